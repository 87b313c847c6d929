"""Stacks of real ranks: waiting, hanging in the user's code, with their interpreter held, and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import LIMIT_S, Bench, rank_pid, until
from screen_frames import console, played, press, rows, settle

from gputrain_tui.console.screens.run_screen import RunScreen
from gputrain_tui.console.screens.stacks_screen import StacksScreen
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import RunDir, Step, decode_events
from trainer.host.ports import free_port

SCRIPT = Path(__file__).with_name("odd_stacks.py")
RECIPE = f"""\
name = "stacks"

[cluster]
on_stall = "report"

[[cluster.nodes]]
cpu_ranks = 6

[train]
script = "{SCRIPT}"
"""


class Stacks:
    """A run of the script, and ``gputrain stacks`` of it."""

    def __init__(self, bench: Bench) -> None:
        path = bench.folder / "stacks.toml"
        path.write_text(RECIPE)
        self.bench = bench
        self.process = bench.start("run", path)
        self.run: Run = until(bench.runs)[0]
        until(lambda: all((self.run.dir.path / f"held{rank}").exists() for rank in range(4)))
        until(lambda: self.steps(4) >= 20 and self.steps(5) >= 20)

    def steps(self, rank: int) -> int:
        reader = RunReader(self.run.dir)
        try:
            return max((each.step for each in reader.poll() if isinstance(each, Step) and each.rank == rank), default=0)
        finally:
            reader.close()

    def call(self, *flags: str) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the JSON of the command."""
        process = self.bench.start("stacks", "last", "--json", *flags)
        out, err = process.communicate(timeout=LIMIT_S)
        print(err)
        return process.returncode, json.loads(out)


def place(code: str) -> str:
    """Return the file and line of the script where ``code`` stands."""
    lines = SCRIPT.read_text().splitlines()
    return f"{SCRIPT.name}:{1 + next(number for number, line in enumerate(lines) if code in line)}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stacks]]:
    """The runs that tests have begun; the newest may go on."""
    runs: list[Stacks] = []
    yield runs
    for run in runs:
        if run.process.poll() is None:
            for _ in range(2):
                run.process.send_signal(signal.SIGINT)
        run.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def stacks(running: list[Stacks], tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    """A run that goes on, shared by tests until one ends it."""
    if not running or running[-1].process.poll() is not None:
        running.append(Stacks(Bench(tmp_path_factory.mktemp("stacks"))))
    return running[-1]


def check_native_frames(stacks: Stacks) -> None:
    """They are added where a program for them is installed."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    installed = any(shutil.which(name, path=folders) for name in ("py-spy", "pystack"))
    _, answer = stacks.call("--native", "--rank", "2")
    (group,) = answer["groups"]
    assert group["problem"] == "the interpreter is held, and the process does not take SIGQUIT"
    if installed:
        assert "hold_interpreter" in [frame["function"] for frame in group["native"][0]["frames"] if frame["user"]]
    else:
        assert group["native_problem"] == "neither py-spy nor pystack is installed on this host"


def test_each_rank_answers_or_says_why_not_and_the_run_is_unharmed(stacks: Stacks) -> None:
    code, answer = stacks.call()
    of_ranks = {tuple(group["ranks"]): group for group in answer["groups"]}
    print(json.dumps(of_ranks.get((0,)), indent=1))
    assert code == 1  # three ranks have no stack
    assert answer["silent"] == []
    assert of_ranks[0,]["line"].endswith(f"{place('library.read(')} in hold_interpreter")
    assert of_ranks[0,]["problem"] == "the interpreter is held"
    assert of_ranks[1,]["problem"] == "the interpreter is held, and the script handles SIGQUIT itself"
    assert of_ranks[2,]["problem"] == "the interpreter is held, and the process does not take SIGQUIT"
    assert f"{place('time.sleep(600)')} in hang" in of_ranks[3,]["line"]
    assert of_ranks[4, 5]["line"].startswith("synchronising gradients, ")
    assert [frame["function"] for frame in of_ranks[4, 5]["threads"][0]["frames"]][-2:] == ["main", "<module>"]
    for _ in range(3):
        assert stacks.call("--rank", "4")[0] == 0
    check_native_frames(stacks)
    assert stacks.process.poll() is None
    logs = "".join(path.read_text() for path in stacks.run.dir.logs.glob("*.log"))
    assert "the script's own handler ran" not in logs


@pytest.mark.timing  # a rank that gets no core for five seconds has not answered
@played
async def test_the_console_asks_all_ranks_shows_their_answers_as_they_come_and_stays_free(stacks: Stacks) -> None:
    app = console(stacks.run)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        await press(pilot, "K")
        assert isinstance(app.screen, StacksScreen)
        assert re.search(r"asked at [\d:]+; \d of 6 have answered", text := "\n".join(rows(app))), text
        await press(pilot, "escape")  # nothing waits for the answers
        assert isinstance(app.screen, RunScreen)
        await press(pilot, "K")
        deadline = time.monotonic() + LIMIT_S
        while "6 of 6 ranks at" not in (text := "\n".join(rows(app))) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            await settle(pilot)
        print(text)
        assert "6 of 6 ranks at" in text
        assert "rank 2: the interpreter is held, and the process does not take SIGQUIT" in text
        assert f"{place('time.sleep(600)')} in hang" in text
        assert "ranks 4, 5: synchronising gradients, " in text
        copied = app.screen.copyable()
        assert copied is not None
        assert "  last collectives: all_reduce " in copied.text
        assert "other threads: t shows them" in copied.text
        await press(pilot, "t")
        more = app.screen.copyable()
        assert more is not None
        assert "\n  event-writer\n" in more.text
        await press(pilot, "S")  # a hang is ended where it is seen
        assert f"Stop {stacks.run.id}?" in "\n".join(rows(app))
        await press(pilot, "escape")
    assert stacks.process.poll() is None


def test_a_stopped_process_is_named_as_stopped_and_the_record_keeps_all(stacks: Stacks) -> None:
    pid = rank_pid(stacks.run, 5)
    os.kill(pid, signal.SIGSTOP)
    try:
        _, answer = stacks.call("--rank", "4", "--rank", "5")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [(group["ranks"], group["problem"]) for group in answer["groups"]] == [
        ([4], ""),
        ([5], "the process is stopped (state T)"),
    ]
    subprocess.run(["kill", str(rank_pid(stacks.run, 0))], check=True)
    stacks.process.communicate(timeout=LIMIT_S)
    code, kept = stacks.call("--rank", "4")
    assert (code, kept["groups"]) == (1, [group for group in answer["groups"] if group["ranks"] == [4]])


def test_a_hanging_worker_of_a_loader_is_shown_with_its_line_and_leaves_the_log_as_it_is(bench: Bench) -> None:
    script = SCRIPT.with_name("hanging_loader.py")
    path = bench.folder / "loader.toml"
    path.write_text(RECIPE.replace(str(SCRIPT), str(script)).replace("cpu_ranks = 6", "cpu_ranks = 2"))
    process = bench.start("run", path)
    run: Run = until(bench.runs)[0]
    until((run.dir.path / "hangs").exists)

    def waiting() -> dict[int, Any] | None:
        """Return the answers by rank, once rank 1 waits and both workers have printed, for which they need a core."""
        out, _ = bench.start("stacks", "last", "--json").communicate(timeout=LIMIT_S)
        of_rank = {group["ranks"][0]: group for group in json.loads(out)["groups"]}
        return of_rank if 1 in of_rank and len(of_rank[1]["workers"]) == 2 else None

    of_rank = until(waiting)
    line = 1 + script.read_text().splitlines().index("    os.read(silent, 1)")
    waits, _, worker = of_rank[1]["line"].partition("; ")
    assert waits.startswith("waiting for a batch of the DataLoader, ")
    assert re.fullmatch(rf"worker process \d+: .*{script.name}:{line} in read_from_dead_server", worker)
    hanging = [each for each in of_rank[1]["workers"] if any(frame["user"] for frame in each["frames"])]
    assert [frame["function"] for frame in hanging[0]["frames"]][:2] == ["read_from_dead_server", "__getitem__"]
    assert len(of_rank[1]["workers"]) == 2, "the other worker waits for its next batch's indices"
    assert of_rank[0]["workers"] == []
    assert "_worker_loop" not in run.dir.rank_log(1).read_text()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)


def test_a_training_under_another_launcher_shows_its_loader_worker_too(bench: Bench) -> None:
    task = f"{SCRIPT.with_name('hanging_task.py')}:HangingTask"
    options = ["--batch-size", "4", "--num-workers", "2", "--max-updates", "100", "--run-dir", "record"]
    only_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "--task", task, *options],
        env={**os.environ, **only_rank, **rendezvous},
        cwd=bench.folder,
        stdout=subprocess.DEVNULL,
    )
    events = RunDir(bench.folder / "record").rank_events(0)

    def waiting() -> dict[str, Any] | None:
        out, _ = bench.start("stacks", "./record", "--json").communicate(timeout=LIMIT_S)
        (group,) = json.loads(out)["groups"]
        return group if "waiting for a batch" in group["line"] else None

    try:
        until(lambda: events.exists() and any(isinstance(each, Step) for each in decode_events(events.read_bytes())))
        assert re.search(
            r"; worker process \d+: .*hanging_task.py:\d+ in read_from_dead_server$", until(waiting)["line"]
        )
    finally:
        process.kill()
        process.wait(LIMIT_S)
