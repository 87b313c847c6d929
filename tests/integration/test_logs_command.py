from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made_runs import append_to_log, make_ended_run as make_run
from utc_home import utc_home  # noqa: F401 - a fixture

from gputrain_tui.history.run_folders import find

ROOT = Path(__file__).parents[2]


def gputrain(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "gputrain_tui", *words], cwd=ROOT, capture_output=True)


# --- logs ------------------------------------------------------------------------------------------------------------


def test_one_rank_is_printed_as_it_is_and_several_with_their_names(home: Path) -> None:
    run = make_run(home, world_size=11)
    append_to_log(run, 10, b"ten\n")
    append_to_log(run, 2, b"two\n\xff\x1b[31mraw\ntorn")
    run.dir.node_log(0).write_bytes(b"node\n")

    one = gputrain("logs", "last", "--rank", "2")
    assert (one.returncode, one.stdout, one.stderr) == (0, b"two\n\xff\x1b[31mraw\ntorn\n", b"")
    both = gputrain("logs", run.id[:15], "--rank", "10", "--rank", "2")
    assert both.stdout == b"[rank 2] two\n[rank 2] \xff\x1b[31mraw\n[rank 2] torn\n[rank 10] ten\n"
    everything = gputrain("logs", run.id)
    assert everything.stdout == b"[node 0] node\n" + both.stdout


def test_an_empty_log_and_a_missing_rank_have_different_messages(home: Path) -> None:
    run = make_run(home)
    silent = gputrain("logs", "last", "--rank", "1")
    assert (silent.returncode, silent.stdout) == (0, b"")
    assert silent.stderr.decode() == f"nothing was printed by rank 1 of {run.id}\n"
    absent = gputrain("logs", "last", "--rank", "2")
    assert (absent.returncode, absent.stdout) == (2, b"")
    assert absent.stderr.decode() == f"gputrain: logs: run {run.id} has no rank 2: its ranks are 0 to 1\n"


@pytest.mark.parametrize(
    ("no_color", "expected"),
    [("", b"\x1b[36m[rank 0]\x1b[0m red\r\n"), ("1", b"[rank 0] red\r\n")],
)
def test_a_real_terminal_gets_colour_unless_it_is_unwanted(home: Path, no_color: str, expected: bytes) -> None:
    append_to_log(make_run(home), 0, b"\x1b[31mred\n")
    master, slave = os.openpty()
    environ = {**os.environ, "NO_COLOR": no_color}
    subprocess.run(
        [sys.executable, "-m", "gputrain_tui", "logs", "last"], cwd=ROOT, env=environ, stdout=slave, check=True
    )
    os.close(slave)
    with os.fdopen(master, "rb", buffering=0) as terminal:
        assert terminal.read(1_000) == expected


def test_the_command_lists_runs_as_a_table_or_as_json(home: Path) -> None:
    empty = gputrain("runs")
    assert (empty.returncode, empty.stdout) == (0, b"")
    assert empty.stderr.decode() == f"no run in {home}/runs yet; start one with `gputrain run RECIPE`\n"
    assert gputrain("runs", "--json").stdout == b"[]\n"
    run = make_run(home)
    assert gputrain("runs").stdout.decode().splitlines()[1].startswith(run.id)
    listed = msgspec.json.decode(gputrain("runs", "--json").stdout)
    assert [entry["id"] for entry in listed] == [run.id]
    assert find("last").id == run.id
