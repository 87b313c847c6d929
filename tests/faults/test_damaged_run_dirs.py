"""Damaged run directories: every command on them ends soon and in order, and harms no other process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
from damage import Damage, damages, lost_run
from examples import examples
from hypothesis import HealthCheck, Phase, example, given, settings
from screen_frames import rows
from textual.pilot import Pilot
from waiting import LIMIT_S

from gputrain_tui import cli
from gputrain_tui.commands.runs import report
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.host_choice import active_plans
from gputrain_tui.console.widgets.run_list import columns_for, draw_run
from gputrain_tui.history import replay
from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run, UnreadableRun, find, list_runs, newest_runs
from gputrain_tui.history.run_listing import RunListing
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
from gputrain_tui.lifecycle.live_run import LiveRun
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.record import Step
from trainer.contract.record.regular_file import open_regular, open_to_append, read_whole
from trainer.host.temporary_folder import delete_temporary_folders, make_temporary_folder

CPU_S = 5.0
"""Of a core, which no command takes; one that waits for ever takes none, and has ``LIMIT_S``."""
MEMORY_BYTES = 1 << 30
"""What one command may take besides what the process has already."""
SETTINGS: Any = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


class LimitExceededError(BaseException):
    """It took too long; no handler of errors takes it for one."""


@contextlib.contextmanager
def limits(seconds: float = CPU_S) -> Iterator[None]:
    """Allow so much time of a core, and memory."""

    def late(*_: object) -> None:
        raise LimitExceededError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


class TerminalBytes(io.BytesIO):
    def isatty(self) -> bool:
        return True


def call(home: Path, *words: str) -> tuple[int, str, str]:
    """Run a command in this process, as on a terminal without colours; return its exit code and what it printed.

    A dumb one: on another, a command that takes seconds moves the cursor to show its progress.
    """
    out, err = (io.TextIOWrapper(TerminalBytes(), encoding="utf-8", write_through=True) for _ in range(2))
    kept = {name: os.environ.get(name) for name in ("GPUTRAIN_HOME", "NO_COLOR", "TERM")}
    os.environ |= {"GPUTRAIN_HOME": str(home), "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            limits(),
        ):
            code = cli.main(words)
        return code, _written(out), _written(err)
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _written(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def harmless(text: str) -> bool:
    """Whether printing a text commands no terminal."""
    return all(char in "\n\t" or char.isprintable() for char in text)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run that lost its supervisor, and one that is whole."""
    home = tmp_path_factory.mktemp("home")
    lost_run(home / "runs")
    synthetic.run(home / "runs", name="whole", steps=3, status="finished")
    return home


@contextlib.contextmanager
def damaged(template: Path, *done: Damage) -> Iterator[tuple[Path, str]]:
    """Give a home whose lost run is damaged, and the run's id."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        shutil.copytree(template, home)
        (run,) = [run.name for run in (home / "runs").iterdir() if run.name.endswith("-demo")]
        for damage in done:
            damage(home / "runs" / run)
        yield home, run


# --- one file, whatever it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "folder", "zero", "loop", "socket"])
def test_only_a_regular_file_is_opened_and_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        os.mknod(path, 0o600 | 0o140000)
    with limits(1.0), pytest.raises(OSError):
        open_regular(path)
    with limits(1.0), pytest.raises(OSError):
        open_to_append(path)


def test_a_link_to_a_regular_file_is_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert read_whole(tmp_path / "link") == b"kept"
    with pytest.raises(OSError):
        open_to_append(tmp_path / "link")
    assert (tmp_path / "there").read_bytes() == b"kept"


def test_an_endless_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)
    with limits(), pytest.raises(OSError, match=r"longer than 1,000 bytes"):
        read_whole(path, 1000)


# --- one number ------------------------------------------------------------------------------------------------------


def test_events_of_ranks_that_the_plan_does_not_have_change_nothing(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=5)
    for name in ("0", "node-0", "run"):
        with (run.dir.events / f"{name}.ndjson").open("ab") as file:
            for rank in (2, 65_000, 10**9, 10**30):
                for event in (
                    {"type": "step", "rank": rank, "step": 6, "epoch": 1, "steps": 1, "samples": 1, "loss": 1.0},
                    {"type": "rank_state", "rank": rank, "state": "spawned"},
                    {"type": "failure", "rank": rank, "kind": "exit", "message": "x"},
                    {"type": "node_sample", "node": rank, "host": "x"},
                    {"type": "node_sample", "node": 0, "host": "x", "ranks": [{"rank": rank}]},
                    {"type": "run_started", "run": "x", "recipe": "x", "world_size": rank + 1, "run_dir": "x"},
                    {"type": "joining", "joined": [rank], "missing": [], "waited_ms": 1},
                ):
                    file.write(json.dumps({"time": synthetic.BEGIN + 9, **event}).encode() + b"\n")
    with limits():
        live = LiveRun(run)
        while live.poll():
            pass
        watch = LiveDiagnosis(run.dir, clock=iter(range(100)).__next__)
        watch.check()
        watch.close()
    assert sorted(live.state.ranks) == [0, 1]
    assert live.state.world_size == live.series.world_size == 2
    assert not live.state.failures
    assert live.state.joining is None
    assert live.state.step == 5
    live.close()


@pytest.mark.parametrize(
    ("key", "value"), [("world_size", 10**9), ("world_size", 0), ("started", 1e17), ("started", -1), ("ended", 1e300)]
)
def test_a_run_with_an_impossible_number_is_one_dim_line_among_the_others(
    template: Path, key: str, value: float
) -> None:
    with damaged(template) as (home, run):
        path = home / "runs" / run / "status.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))
        code, out, err = call(home, "runs")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[1].split()[1:3] == ["finished", "whole"]
        assert lines[2].startswith(f"{run}   ")
        assert "unreadable: status.json is damaged: Expected" in lines[2]
        assert f"`$.{key}`" in lines[2]
        entries = json.loads(call(home, "runs", "--json")[1])
        assert [entry["state"] for entry in entries] == ["finished", "unreadable"]
        assert set(entries[0]) == set(entries[1])
        assert call(home, "logs", run)[0] == 2
        assert f"run {run} cannot be read: status.json is damaged" in call(home, "logs", run)[2]


def test_an_unreadable_run_is_dim_in_both_lists(template: Path) -> None:
    with damaged(template, Damage("status.json", "fifo")) as (home, run):
        *_, listed = RunListing(home / "runs").read(now=synthetic.BEGIN)
        entries = listed.entries
        text = "unreadable: status.json cannot be read: it is not a regular file"
        title, whole, line = report(entries, colour=True).splitlines()
        assert line.startswith("\x1b[2m") == line.endswith(f"{text}\x1b[0m") is True
        assert "\x1b" not in title + whole
        row = draw_run(entries[1], 100, columns_for(100, entries), number=None)
        assert {role for output, role in row if output.strip()} == {"dim"}
        assert run in "".join(output for output, _ in row)


def test_a_folder_without_a_status_is_a_run_only_where_it_is_named_like_one(tmp_path: Path) -> None:
    whole = synthetic.run(tmp_path, steps=0)
    for name in ("20261121-120000-gone", "notes", "20261121-110000-other/agents"):
        (tmp_path / name).mkdir(parents=True)
    found = list(newest_runs(tmp_path))
    assert [run.id for run in found if isinstance(run, Run)] == [whole.id]
    assert [(run.id, run.problem) for run in found if isinstance(run, UnreadableRun)] == [
        ("20261121-120000-gone", "status.json cannot be read: No such file or directory"),
        ("20261121-110000-other", "only the part of this host is here; the record is on the machine that started it"),
    ]
    with pytest.raises(RequestError, match=r"run 20261121-120000-gone cannot be read: status.json cannot be read"):
        find("20261121-12", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 3},
        {"world_size": 10**9},
        {"nodes": []},
        {"nodes": [{"ranks": [0, 10**9]}]},
        {"nodes": [{"argv": ["python", "--stop-grace", "nan"]}]},
        {"nodes": [{"argv": ["python", "--stop-grace"]}]},
        {"nodes": [{"argv": []}]},
    ],
)
def test_a_plan_that_contradicts_itself_is_no_plan(tmp_path: Path, change: dict[str, Any]) -> None:
    run = synthetic.run(tmp_path, steps=0)
    plan = json.loads(run.dir.plan.read_bytes())
    changed = {**plan, **change}
    if change.get("nodes"):
        changed["nodes"] = [{**plan["nodes"][0], **change["nodes"][0]}]
    run.dir.plan.write_text(json.dumps(changed))
    with pytest.raises(RecordError, match=r"plan\.json is damaged: "):
        read_plan(run.dir)


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=5)
    os.truncate(run.dir.rank_events(1), 1 << 40)
    reader = RunReader(run.dir)
    with limits():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        events = [event for _ in range(20) for event in reader.poll()]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(isinstance(event, Step) for event in events) == 10
    assert grown < 64 << 10, "kB, after 160 MB without a newline"
    reader.close()


def test_of_a_folder_that_a_killed_supervisor_s_file_names_only_the_run_s_own_folders_are_deleted(
    tmp_path: Path,
) -> None:
    run, other = (synthetic.run(tmp_path / name, steps=0) for name in ("one", "other"))
    named = tmp_path / "named"
    named.mkdir()
    own = make_temporary_folder(run.dir.path, 0, named)
    kept = [make_temporary_folder(other.dir.path, 0, named), named / "gt0123456789", named / f"{own.name}.txt"]
    for path in kept[1:]:
        path.mkdir()
    kept.append(named / f"{own.name[:-4]}ffff")
    kept[-1].symlink_to(kept[0])
    for folder in (named, Path("relative"), Path(), named / "missing"):
        delete_temporary_folders(run.dir.path, [0, 1], folder)
    assert sorted(named.iterdir()) == sorted(kept)


# --- any file --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(20, 120), **SETTINGS)
@given(damage=damages)
@example(damage=Damage("events/0.ndjson", "fifo"))
@example(damage=Damage("status.json", "link", "/dev/zero"))
@example(damage=Damage("recipe.toml", "fifo"))
@example(damage=Damage("logs", "bytes", b""))
def test_commands_that_only_read_end_in_order_whatever_a_run_directory_holds(template: Path, damage: Damage) -> None:
    with damaged(template, damage) as (home, run):
        output = ["-o", str(home / "out"), "--force"]
        for words in (
            ["runs"],
            ["runs", "--json"],
            ["logs", run],
            ["logs", run, "--rank", "1"],
            *(["export", run, "--to", form, *output] for form in ("csv", "jsonl", "chrome-trace", "archive")),
        ):
            code, out, err = call(home, *words)
            assert code in (0, 2), (words, err)
            assert harmless(out), words
            assert harmless(err), words
        assert "whole" in call(home, "runs")[1], "the other run is listed all the same"
        code, out, err = call(home, "run", "--resume", run)
        assert code in (2, 3), err
        assert harmless(out + err)
        with limits():
            for found in list_runs(home / "runs"):
                assert found.state in ("lost", "finished", "failed", "stopped", "running", "starting", "stopping")


@settings(max_examples=examples(4, 24), **SETTINGS)
@given(damage=damages, short=damages)
@example(damage=Damage("events/1.ndjson", "endless"), short=Damage("tmp", "missing"))
@example(damage=Damage("plan.json", "fifo"), short=Damage("status.json", "number", (1, 60_000)))
def test_the_console_shows_a_run_whatever_its_directory_holds(template: Path, damage: Damage, short: Damage) -> None:
    with damaged(template, damage, short) as (home, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRAIN_HOME", str(home))
        patch.setattr(replay, "READ_WHOLE_BYTES", 0)  # also a short record is shown from its digest where there is one
        asyncio.run(_look_at_everything(home))


async def _look_at_everything(home: Path) -> None:
    for run in list_runs(home / "runs"):
        if not run.id.endswith("-demo"):
            continue
        with limits(6 * CPU_S):  # a whole console, two screens of it
            active_plans([run])
            live = LiveRun(run)
            for _ in range(3):
                live.poll()
            app = GputrainApp(run, clocked=False, follow=lambda _, live=live: live)
            async with app.run_test(size=(120, 40)) as pilot:
                await settle_once(pilot)
                app.screen.repaint()  # type: ignore[attr-defined]
                await pilot.pause()
                assert all(harmless(row) for row in rows(app))
                await app.action_go("history")
                await settle_once(pilot)
                assert all(harmless(row) for row in rows(app))
            live.close()


async def settle_once(pilot: Pilot[Any]) -> None:
    """Paint what there is, once the work in the background is done; the record may have no end."""
    await pilot.pause()
    for worker in list(pilot.app.workers):
        await worker.wait()
    await pilot.pause()


# --- real processes --------------------------------------------------------------------------------------------------

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
WITH_BYSTANDERS = """
ulimit -v 4000000
sleep 1000 & one=$!
GPUTRAIN_RUN=/another/run sleep 1000 & two=$!
"$@"
code=$?
kill -0 $one && kill -0 $two && echo BYSTANDERS-LIVE
exit $code
"""


def in_namespace(home: Path, *words: str) -> tuple[int, str, str]:
    """Run a command where it can signal no process but two bystanders."""
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", WITH_BYSTANDERS, "sh", sys.executable, "-m", "gputrain_tui", *words],
        env={**os.environ, "GPUTRAIN_HOME": str(home), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def namespaces() -> None:
    """Processes of its own for each command."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a PID namespace")


def stop_in_order(template: Path, *done: Damage) -> tuple[int, str]:
    with damaged(template, *done) as (home, run):
        code, out, err = in_namespace(home, "stop", run)
        assert out.endswith("BYSTANDERS-LIVE\n"), (out, err)
        assert code in (0, 1, 2), err
        assert "Traceback" not in out + err
        assert harmless(out + err)
        return code, out


@settings(max_examples=examples(4, 24), **SETTINGS)
@given(damage=damages)
@example(damage=Damage("supervisor.lock", "fifo"))
@example(damage=Damage("plan.json", "fifo"))
def test_stopping_and_adopting_a_damaged_run_ends_and_signals_no_foreign_process(
    namespaces: None, template: Path, damage: Damage
) -> None:
    stop_in_order(template, damage)


@pytest.mark.parametrize(
    "damage",
    [
        Damage("tmp", "missing"),
        Damage("events/run.ndjson", "fifo"),
        Damage("events/0.ndjson", "link", "/dev/zero"),
        Damage("logs/supervisor.log", "fifo"),
        Damage("attempt.json", "number", (0, 10**30)),
        Damage("mark", "fifo"),
        Damage("nodes/0.json", "endless"),
    ],
    ids=str,
)
def test_a_lost_run_is_taken_over_and_ended_without_what_is_damaged(
    namespaces: None, template: Path, damage: Damage
) -> None:
    code, out = stop_in_order(template, damage)
    assert code == 0
    assert " is stopped" in out or " has failed" in out  # by which of the two ends it was ended first
    assert "; processes left: none" in out


@pytest.mark.parametrize(
    "damage",
    [
        Damage("events/1.ndjson", "fifo"),
        Damage("events/0.ndjson", "endless"),
        Damage("plan.json", "number", (0, 10**9)),
        Damage("events/node-0.ndjson", "number", (1, 10**9)),
    ],
    ids=str,
)
def test_attach_shows_a_damaged_run_and_leaves_at_a_key(template: Path, damage: Damage) -> None:
    with damaged(template, damage) as (home, run):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", sys.executable, "-m", "gputrain_tui", "attach", run],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "GPUTRAIN_HOME": str(home), "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(slave)
        try:
            output = _read_until(master, b"rank")
            os.write(master, b"q")
            output += _read_until(master, None)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(master)
        assert b"Traceback" not in output


def _read_until(master: int, needle: bytes | None) -> bytes:
    """Read what comes out until a text has come, or for None until the other end is closed."""
    output = b""
    deadline = time.monotonic() + LIMIT_S
    while needle is None or needle not in output:
        left = deadline - time.monotonic()
        assert left > 0, output[-2000:]
        if select.select([master], [], [], left)[0]:
            try:
                output += os.read(master, 1 << 16)
            except OSError:
                return output
    return output
