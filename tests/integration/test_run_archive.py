"""A run as one file: what is in it, what is hidden, that it opens elsewhere, and what is refused to be opened."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import synthetic
from commands import Command, command
from made_runs import append_to_log

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run, find
from gputrain_tui.history.status_file import write_status
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.lifecycle.recipe_to_run import load
from gputrain_tui.lifecycle.stop_run import stop_by_name
from trainer.contract.errors import RequestError
from trainer.contract.record import Failure, RankState, decode_events, encode_event

TOKEN = "hf_abcdefghijkl"
RECIPE = f"""\
# as it was asked for
name = "demo"

[cluster]
setup = "module load cuda; export WANDB_API_KEY='wandb-0123456789' OMP_NUM_THREADS=4"

[cluster.env]
HF_TOKEN = "{TOKEN}"
NCCL_DEBUG = "INFO"
DB_PASSWORD = 12345678

[[cluster.nodes]]
cpu_ranks = 2
env = {{ aws_secret_access_key = "AKIA/short" }}

[train]
task = "lm"
max_tokens = 4096

[task]
tokenizer = "wordpiece"
api_key = "task-secret-1"
"""
SECRETS = (TOKEN, "wandb-0123456789", "12345678", "AKIA/short", "task-secret-1", "from-my-shell-1")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that had secrets, and printed and recorded one."""
    run = synthetic.run(tmp_path / "home" / "runs", steps=40, status="failed", straggler=1, failed_rank=1)
    run.dir.recipe.write_text(RECIPE)
    plan = read_plan(run.dir)
    plan.nodes[0].env = {"HF_TOKEN": TOKEN, "NCCL_DEBUG": "INFO"}
    plan.nodes[0].argv += ["--api-key", "task-secret-1", "--max-tokens", "4096", "--hub-token=task-secret-1"]
    run.dir.plan.write_bytes(msgspec.json.encode(plan))
    for number in range(3000):
        append_to_log(run, 0, b"%d: logged in with %s\n" % (number, TOKEN.encode()))
    append_to_log(run, 1, b"MY_API_TOKEN is from-my-shell-1\n")
    failure = Failure(time=synthetic.BEGIN + 9, rank=0, kind="exception", message=f"401 for {TOKEN}", traceback="…")
    with run.dir.rank_events(0).open("ab") as file:
        file.write(encode_event(failure))
    (run.dir.checkpoints / "step_00000040.pt").write_bytes(b"weights")
    (run.dir.path / "attempt.json").write_text("{}")
    (run.dir.logs / "odd name.log").write_text("x")
    return run


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_API_TOKEN", "from-my-shell-1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return command(capsys)


def members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {info.name: (tar.extractfile(info) or io.BytesIO()).read() for info in tar.getmembers()}


def test_an_archive_has_the_record_without_checkpoints_and_without_secrets(call: Command, run: Run) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.dir.path.rglob("*") if path.is_file()}
    done = call("export", run.id, "--to", "archive")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{run.id}.tar.gz: 7 files of {run.id}, ")
    assert "hidden: 9 values of variables, arguments and settings\n" in done.stderr
    assert "left out: what ranks printed, and texts of their exceptions; --logs adds them\n" in done.stderr
    found = members(Path(f"{run.id}.tar.gz"))
    assert {name.removeprefix(f"{run.id}/") for name in found} == {
        "recipe.toml", "plan.json", "status.json", "events/0.ndjson", "events/1.ndjson", "events/node-0.ndjson",
        "events/run.ndjson",
    }  # fmt: skip
    whole = b"".join(found.values())
    assert not [secret for secret in SECRETS if secret.encode() in whole]
    recipe = tomllib.loads(found[f"{run.id}/recipe.toml"].decode())
    assert recipe["cluster"]["env"]["NCCL_DEBUG"] == "INFO"
    assert recipe["cluster"]["setup"] == recipe["task"]["api_key"] == "•••"
    assert recipe["train"] == {"task": "lm", "max_tokens": 4096}
    assert b"asked for" not in found[f"{run.id}/recipe.toml"], "a comment may hold a setting that was commented out"
    (node,) = json.loads(found[f"{run.id}/plan.json"])["nodes"]
    assert node["env"] == {"HF_TOKEN": "•••", "NCCL_DEBUG": "INFO"}
    assert node["argv"][-5:] == ["--api-key", "•••", "--max-tokens", "4096", "--hub-token=•••"]
    kept, original = found[f"{run.id}/events/0.ndjson"], run.dir.rank_events(0).read_bytes()
    assert len(kept) == len(original)
    *events, last = decode_events(kept)
    measured = [event for event in events if not isinstance(event, Failure | RankState)]
    assert measured == [event for event in decode_events(original) if not isinstance(event, Failure | RankState)]
    assert isinstance(last, Failure)
    assert (last.message, last.traceback) == ("***", "")
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.dir.path.rglob("*") if path.is_file()}
    assert after == before


def test_an_archive_opens_where_there_is_no_run(call: Command, run: Run, tmp_path: Path) -> None:
    archive = tmp_path / "shared.tar.gz"
    csv = call("export", run.id, "--to", "csv", "-o", "-").stdout
    logs = call("logs", run.id, "--rank", 1).stdout
    assert call("export", run.id, "--to", "archive", "--logs", "-o", archive).returncode == 0
    environment = {**os.environ, "GPUTRAIN_HOME": str(tmp_path / "elsewhere")}

    def run_elsewhere(*words: object) -> str:
        line = [sys.executable, "-m", "gputrain_tui", *map(str, words)]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout

    assert run_elsewhere("export", archive, "--to", "csv", "-o", "-") == csv
    assert run_elsewhere("logs", archive, "--rank", 1) == logs.replace("from-my-shell-1", "*" * 15)
    assert not list(tmp_path.glob("gputrain-archive-*")), "what was unpacked is deleted"

    live = LiveRun(find(str(archive)))
    while live.poll():
        pass
    live.close()
    assert (live.id, live.status, live.over) == (run.id, "failed", True)
    assert live.state.root_cause is not None
    assert live.state.root_cause.kind == "out_of_memory"
    assert oct(live.run.dir.path.parent.stat().st_mode & 0o777) == "0o700"


def test_the_archive_of_a_running_run_is_no_running_run(call: Command, run: Run, tmp_path: Path) -> None:
    run.status.status, run.status.ended, run.status.exit_code = "running", None, None
    write_status(run.dir, run.status)
    done = call("export", run.id, "--to", "archive", "-o", "x.tar.gz")
    assert f"{run.id} is still running: its record goes to step 40 so far" in done.stderr
    assert find("x.tar.gz").state == "lost"
    with pytest.raises(RequestError, match="is an archive; it has no processes to stop"):
        stop_by_name("x.tar.gz")
    with pytest.raises(RequestError, match="is an archive, which holds no checkpoints"):
        load(None, overrides=(), resume="x.tar.gz")
    stderr = call("export", "x.tar.gz", "--to", "csv", "-o", "-").stderr
    assert f"{run.id} has no end, it was archived while it ran: its record goes to step 40" in stderr


# ---------------------------------------------------------------------------------------------- hostile archives


def entry(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive_of(path: Path, *entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w:gz", format=form) as tar:
        for info, data in (entry("r/recipe.toml", b'name = "r"\n'), *entries):
            tar.addfile(info, io.BytesIO(data))


def of_entries(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> Callable[[Path], None]:
    return lambda path: archive_of(path, *entries, form=form)


def cut_off(path: Path) -> None:
    archive_of(path, entry("r/logs/0.log", os.urandom(5000)))
    os.truncate(path, path.stat().st_size - 700)


def flipped(path: Path) -> None:
    archive_of(path, entry("r/logs/0.log", os.urandom(5000)))
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # of the checksum
    path.write_bytes(data)


def bomb(path: Path) -> None:
    """Announce and hold 2 GiB of zeros in 2 MB."""
    info, _ = entry("r/logs/0.log")
    info.size = 2 << 30
    zeros = gzip.compress(bytes(1 << 24), 9)
    with path.open("wb") as file:
        file.write(gzip.compress(entry("r/recipe.toml")[0].tobuf(tarfile.USTAR_FORMAT)))
        file.write(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT)))
        for _ in range(128):
            file.write(zeros)


def endless_end(path: Path) -> None:
    """Go on with zeros where an archive ends."""
    path.write_bytes(gzip.compress(entry("r/recipe.toml")[0].tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 24)))


def of_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


NONE = "{file} is not an archive of a run: "
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "absolute": (of_entries(entry("/etc/evil", b"x")), NONE + "'/etc/evil' would be unpacked outside its folder"),
    "parent": (of_entries(entry("r/../../evil", b"x")), NONE + "'r/../../evil' would be unpacked outside its folder"),
    "symlink": (
        of_entries(entry("r/logs", type=tarfile.SYMTYPE, linkname="/tmp"), entry("r/logs/0.log", b"x")),
        NONE + "'r/logs' is a link",
    ),
    "hard link": (
        of_entries(entry("r/logs/0.log", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
        NONE + "'r/logs/0.log' is a link",
    ),
    "device": (of_entries(entry("r/logs/0.log", type=tarfile.CHRTYPE)), NONE + "'r/logs/0.log' is a device"),
    "pipe": (of_entries(entry("r/logs/0.log", type=tarfile.FIFOTYPE)), NONE + "'r/logs/0.log' is a pipe"),
    "code": (of_entries(entry("r/checkpoints/a.pt", b"x")), NONE + "'r/checkpoints/a.pt' is not a file of a run"),
    "hidden": (of_entries(entry("r/logs/.bashrc", b"x")), NONE + "'r/logs/.bashrc' is not a file of a run"),
    "escapes": (of_entries(entry("r/logs/\x1b[2J", b"x")), NONE + "'r/logs/\\x1b[2J' is not a file of a run"),
    "folder": (of_entries(entry("r/bin", type=tarfile.DIRTYPE)), NONE + "'r/bin' is not a folder of a run"),
    "two runs": (
        of_entries(entry("s/plan.json", b"{}")),
        NONE + "'s/plan.json' is not in the folder of one run",
    ),
    "twice": (
        of_entries(entry("r/plan.json", b"{}"), entry("r/plan.json", b"{}")),
        NONE + "'r/plan.json' occurs twice",
    ),
    "extended header": (
        of_entries(entry("r/logs/" + "9" * 200, b"x"), form=tarfile.PAX_FORMAT),
        NONE + "'././@PaxHeader' is not a regular file",
    ),
    "long name": (
        of_entries(entry("r/logs/" + "9" * 200, b"x"), form=tarfile.GNU_FORMAT),
        NONE + "'././@LongLink' is not a regular file",
    ),
    "bomb": (bomb, NONE + "it unpacks to more than 200 times its size"),
    "endless end": (endless_end, NONE + "data follows its end"),
    "cut off": (cut_off, "{file} is damaged: it cannot be unpacked completely"),
    "bit flip": (flipped, "{file} is damaged: it cannot be unpacked completely"),
    "no tar": (of_bytes(gzip.compress(b"hello" * 200)), NONE + "its content is not a tar archive, or is cut off"),
    "no gzip": (of_bytes(b"PK\x03\x04 a zip"), NONE + "it is not compressed with gzip"),
    "nothing": (of_bytes(b""), NONE + "it is not compressed with gzip"),
    "empty gzip": (of_bytes(gzip.compress(b"")), NONE + "its content is not a tar archive, or is cut off"),
    "pipe itself": (os.mkfifo, "{file} cannot be read: it is not a regular file"),
    "not there": (lambda path: None, "{file} cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_in_one_line_and_leaves_nothing(call: Command, tmp_path: Path, kind: str) -> None:
    make, message = HOSTILE[kind]
    file = tmp_path / "evil.tar.gz"
    make(file)
    done = call("logs", "evil.tar.gz")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gputrain: {message.format(file='evil.tar.gz')}\n"
    assert not Path("/etc/evil").exists()
    assert not (tmp_path.parent / "evil").exists()
    assert not list(tmp_path.glob("gputrain-archive-*"))


def test_an_archive_without_a_recipe_is_none(call: Command, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        info, data = entry("r/logs/0.log", b"hello\n")
        tar.addfile(info, io.BytesIO(data))
    assert call("logs", "x.tgz").stderr == "gputrain: x.tgz is not an archive of a run: it has no recipe.toml\n"


def test_a_run_directory_packed_by_hand_opens_too(call: Command, run: Run, tmp_path: Path) -> None:
    kept = ["recipe.toml", "plan.json", "status.json", "events", "logs/0.log", "logs/1.log"]
    words = ["tar", "czf", "x.tar.gz", "-C", run.dir.path.parent, *(f"{run.id}/{name}" for name in kept)]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert "logged in" in call("logs", "x.tar.gz", "--rank", 0).stdout


def test_a_recipe_that_cannot_be_read_is_left_out_of_the_archive(call: Command, run: Run) -> None:
    run.dir.recipe.write_text(f'name = "demo\nHF_TOKEN={TOKEN}')
    run.dir.plan.write_bytes(b"{")
    done = call("export", run.id, "--to", "archive", "-o", "x.tar.gz")
    assert "left out: recipe.toml: it is missing or not valid TOML\n" in done.stderr
    assert "left out: plan.json: it is missing or damaged\n" in done.stderr
    found = members(Path("x.tar.gz"))
    assert found[f"{run.id}/recipe.toml"] == b'name = "demo"\n'
    assert json.loads(found[f"{run.id}/status.json"])["run"] == run.id


COMMAND = "curl -H 'Authorization: Bearer abc' -u me:on-end-secret https://me:pw@ntfy.example/x"


@pytest.mark.parametrize(
    "table",
    [
        f'[report]\ntensorboard = true\non_end = "{COMMAND}"\n',
        f'report.tensorboard = true\nreport.on_end = "{COMMAND}"\n',
        f'report = {{ tensorboard = true, on_end = "{COMMAND}" }}\n',
        f'[report]\ntensorboard = true\non_end = """\\\n  {COMMAND}"""  # abc\n',
    ],
    ids=["table", "dotted", "inline", "several lines"],
)
@pytest.mark.parametrize("key", ["on_end", "on_finding"])
def test_commands_of_the_report_are_left_out_with_their_output(call: Command, run: Run, table: str, key: str) -> None:
    table = table.replace("on_end", key)
    run.dir.recipe.write_text(f'name = "demo"  # {key} = "curl -u me:abc"\n{table}')
    (run.dir.logs / f"{key}.log").write_text("+ curl -H 'Authorization: Bearer abc'\n")
    append_to_log(run, 0, b"sent on-end-secret\n")
    done = call("export", run.id, "--to", "archive", "--logs", "-o", "x.tar.gz")
    assert done.returncode == 0, done.stderr
    assert f"left out: {key} of recipe.toml: " in done.stderr
    assert f"left out: logs/{key}.log: " in done.stderr
    found = members(Path("x.tar.gz"))
    assert tomllib.loads(found[f"{run.id}/recipe.toml"].decode()) == {
        "name": "demo",
        "report": {"tensorboard": True},
    }
    whole = b"".join(found.values())
    assert not [secret for secret in (b"Bearer abc", b"me:abc", b"on-end-secret", b"me:pw") if secret in whole]
