"""A run is written to TensorBoard and to Weights & Biases while it goes on; killed processes lose no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lone_kill import kill_without_successor
from made_runs import append_events
from stand_in_runs import stand_in_run
from waiting import LIMIT_S, until

from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.supervisor_process import adopt, start_supervisor
from trainer.contract.record import Step, Validation, encode_event

STEPS = 40
"""That the stand-ins record before they wait; the test records more in their place."""


def more_steps(run: Run, first: int, last: int) -> None:
    for rank in range(2):
        steps = [
            Step(time=2e9 + n, rank=rank, step=n, epoch=1, steps=1, samples=4, loss=n + rank / 2, step_ms=5.0)
            for n in range(first, last + 1)
        ]
        append_events(run.dir, rank, *steps)


def sink_of(run: Run, name: str) -> int | None:
    """Return the process of a sink, once it writes."""
    for pid in leftovers.processes_of(run.dir.path):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"gputrain_tui.lifecycle.sink_program" in words and name.encode() in words:
            return pid
    return None


def written(run: Run) -> int:
    """Return up to which step TensorBoard shows the mean over the ranks."""
    if not (run.dir.path / "tensorboard").is_dir():
        return 0
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found = EventAccumulator(str(run.dir.path / "tensorboard"), size_guidance={SCALARS: 0}).Reload()
    return max((e.step for e in found.Scalars("train/loss")), default=0) if found.Tags()["scalars"] else 0


def run_through(run: Run, name: str, *, kill_sink: bool) -> None:
    """Take a run from start to end over two supervisors that are killed, the second one perhaps with its sink."""
    supervisor = start_supervisor(run.dir, leased=False)
    until(lambda: sink_of(run, name))
    if name == "tensorboard":  # wandb keeps its newest records in memory
        until(lambda: written(run) == STEPS, "the first steps")
    assert read_status(run.dir).status == "running"  # type: ignore[union-attr]
    kill_without_successor(supervisor.pid)
    supervisor.wait()
    more_steps(run, STEPS + 1, STEPS + 10)
    until(lambda: sink_of(run, name) is None)  # the sink ends with its supervisor
    adopt(run)
    until(lambda: sink_of(run, name))
    if name == "tensorboard":
        until(lambda: written(run) == STEPS + 10, "the steps after the adoption")
    (second,) = leftovers.supervisors_of(run.dir.path)
    sink = until(lambda: sink_of(run, name))
    if kill_sink:
        os.kill(sink, signal.SIGSTOP)  # so that it dies with what it has not read yet
    more_steps(run, STEPS + 11, STEPS + 15)
    os.kill(second, signal.SIGKILL)
    if kill_sink:
        os.kill(sink, signal.SIGKILL)
    until(lambda: not leftovers.supervisors_of(run.dir.path))
    validation = Validation(time=2e9, step=STEPS + 15, epoch=1, split="valid", loss=0.5, metrics={"accuracy": 0.75})
    with run.dir.rank_events(0).open("ab") as file:
        file.write(encode_event(validation))
    adopt(run)
    (run.dir.path / "go").touch()
    until(lambda: not leftovers.supervisors_of(run.dir.path))
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.message) == ("finished", None)
    assert leftovers.processes_of(run.dir.path) == []


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    made = stand_in_run(
        tmp_path / "runs", "gated", steps=STEPS, recipe=f"[train]\nlr = 0.5\n[report]\n{request.param}\n"
    )
    yield made
    for pid in leftovers.supervisors_of(made.dir.path):  # of a test that failed
        os.kill(pid, signal.SIGKILL)
    leftovers.kill_processes(made.dir.path)


@pytest.mark.parametrize("run", ["tensorboard = true"], indirect=True)
def test_tensorboard_has_every_step_once_also_where_sink_and_supervisor_were_killed(run: Run) -> None:
    reader: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: pip install '.[tensorboard]'",
    )
    run_through(run, "tensorboard", kill_sink=True)
    folder = run.dir.path / "tensorboard"
    last = STEPS + 15

    def read(part: str) -> Any:
        found = reader.EventAccumulator(str(folder / part), size_guidance={reader.SCALARS: 0})
        return found.Reload()

    for part, value in (("rank_0", last), ("rank_1", last + 0.5), (".", last + 0.25), ("highest", last + 0.5)):
        losses = read(part).Scalars("train/loss")
        assert [event.step for event in losses] == list(range(1, last + 1)), part
        assert losses[-1].value == value
    assert [(event.step, event.value) for event in read(".").Scalars("valid/accuracy")] == [(last, 0.75)]
    assert "_hparams_/session_start_info" in read(".").Tags()["tensors"]


@pytest.mark.parametrize("run", ["tensorboard = true"], indirect=True)
def test_a_signal_ends_the_wait_for_a_hanging_sink(run: Run) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'")
    supervisor = start_supervisor(run.dir, leased=False)
    until(lambda: written(run) == STEPS)
    sink = sink_of(run, "tensorboard")
    assert sink is not None
    os.kill(sink, signal.SIGSTOP)
    (run.dir.path / "go").touch()
    until(lambda: read_status(run.dir).status == "finished")  # type: ignore[union-attr]
    supervisor.terminate()
    assert supervisor.wait(LIMIT_S) == 0
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.exit_code) == ("finished", 0)
    assert "report.tensorboard is incomplete" in str(status.message)
    assert leftovers.processes_of(run.dir.path) == []


def test_neither_console_nor_supervisor_loads_the_packages() -> None:
    program = """
import importlib, pkgutil, sys, gputrain_tui
for module in pkgutil.walk_packages(gputrain_tui.__path__, "gputrain_tui."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print({"tensorboard", "wandb", "torch"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("run", ["wandb = 'tests'"], indirect=True)
def test_wandb_has_every_step_also_where_the_supervisor_was_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_through(run, "wandb", kill_sink=False)  # what it has not written yet dies with wandb's own processes
    rows = list(logged(run.dir.path / "wandb"))
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    known = dict.fromkeys(range(1, STEPS + 1), 2.0)
    assert losses == known | {step: step + 0.25 for step in range(STEPS + 1, STEPS + 16)}
    assert {row["valid/accuracy"] for row in rows if "valid/accuracy" in row} == {0.75}


def logged(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what was logged, from wandb's files: records as in a log of LevelDB, each a message of wandb's own."""
    from wandb.proto import wandb_internal_pb2

    for path in folder.glob("offline-run-*/*.wandb"):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            room = 32_768 - at % 32_768  # of a block, whose end holds no header
            if room < 7:
                at += room
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the only or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                whole = b""
                if record.HasField("history"):
                    items = record.history.item
                    yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
