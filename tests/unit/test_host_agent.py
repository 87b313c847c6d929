"""Files that a session of a node sends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gputrain_tui.hosts.host_agent import identity_of
from gputrain_tui.hosts.host_frames import MAX_DATA_BYTES, RefusedCallError
from gputrain_tui.hosts.host_program import CallServer
from gputrain_tui.hosts.host_session import DISK_STANDS, Session


def test_on_a_new_host_the_record_goes_on_at_the_offsets_of_the_launching_side(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "events" / "1.ndjson").write_bytes(b"longer than there")
    sizes = {
        "events/0.ndjson": 9,
        "logs/0.log": 5,
        "events/1.ndjson": 3,
        "logs/1.log": 0,
        "events/machine-h2.ndjson": 7,
    }
    request = {"run_dir": str(run_dir), "env": {"GPUTRAIN_HOME": str(tmp_path)}, "node": 0, "ranks": [0, 1]}
    session = Session(CallServer(b""), {**request, "sizes": sizes, "attempt": "first", "leased": False})
    session.extend_record(["logs/0.log"])
    assert (run_dir / "events" / "0.ndjson").read_bytes() == 8 * b"\0" + b"\n"
    assert (run_dir / "logs" / "0.log").read_bytes() == 5 * b"\0"
    assert (run_dir / "events" / "1.ndjson").read_bytes() == b"longer than there"
    assert not (run_dir / "events" / "machine-h2.ndjson").exists()
    with (run_dir / "events" / "0.ndjson").open("ab") as file:
        file.write(b"{}\n")
    frames, _ = session.growth(1)
    assert [(each.name, each.offset, each.data) for each in frames if each.name == "events/0.ndjson"] == [
        ("events/0.ndjson", 9, b"{}\n")
    ]


@pytest.mark.parametrize(("size", "sent"), [(MAX_DATA_BYTES, True), (MAX_DATA_BYTES + 1, False)])
def test_a_file_larger_than_a_frame_stays_on_the_host_and_the_session_goes_on(
    tmp_path: Path, size: int, sent: bool
) -> None:
    run_dir = tmp_path / "runs" / "run"
    for folder in ("events", "logs", "digest", "nodes"):
        (run_dir / folder).mkdir(parents=True)
    with (run_dir / "logs" / "collectives_0").open("wb") as dump:
        dump.truncate(size)
    (run_dir / "nodes" / "0.json").write_text("{}")
    env = {"GPUTRAIN_HOME": str(tmp_path)}
    request = {"run_dir": str(run_dir), "env": env, "node": 0, "ranks": [0], "sizes": {}, "attempt": "first"}
    frames, _ = Session(CallServer(b""), {**request, "leased": False}).growth(1)
    assert [each.name for each in frames] == [*(["logs/collectives_0"] if sent else []), "nodes/0.json"]


def test_an_agent_that_could_not_tell_its_end_as_its_folder_was_deleted_was_not_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    env = {"GPUTRAIN_HOME": str(tmp_path)}
    request = {"run_dir": str(run_dir), "env": env, "node": 0, "ranks": [0], "sizes": {}, "attempt": "first"}
    session = Session(CallServer(b""), {**request, "leased": False})
    session.folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        session.agent = {**identity_of(process.pid), "node": identity_of(process.pid)}
        assert session.exit_code() is None
    assert session.exit_code() == -signal.SIGKILL
    shutil.rmtree(run_dir)
    with pytest.raises(RefusedCallError, match=f"the run directory {run_dir} was deleted there during the run"):
        session.exit_code()


BEAT = """
import os, sys
from gputrain_tui.hosts.host_program import CallServer
from gputrain_tui.hosts.host_session import Session
request = {"run_dir": sys.argv[1], "env": {"GPUTRAIN_HOME": sys.argv[1]}, "node": 0, "ranks": [0], "sizes": {}}
session = Session(CallServer(b""), {**request, "attempt": "first", "leased": False})
session.folder.mkdir(parents=True)
os.mkfifo(session.folder / f".beat.{os.getpid()}")
print(session.folder / f".beat.{os.getpid()}", flush=True)
print("answers", repr(session.beat({})), flush=True)
"""


def test_a_session_says_that_its_disk_stands_still_until_it_can_answer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BEAT, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        written = Path(process.stdout.readline().decode().strip())
        assert DISK_STANDS.encode() in process.stdout.readline()
        with written.open("rb"):  # the write ends once the pipe has a reader
            rest = process.stdout.read()
    assert rest.splitlines()[-1].endswith(b"answers ''")
