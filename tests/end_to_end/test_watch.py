from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks
from rank_group import Gang
from torch import nn

from trainer.contract.record import (
    AnyEvent,
    Checksum,
    Failure,
    Finding,
    RankState,
    RunDir,
    ShareChange,
    Step,
    decode_events,
)
from trainer.watch import watch

HERE = Path(__file__).parent
SCRIPT = HERE.parents[0] / "support" / "watched_script.py"
BIN = Path(sys.executable).parent


def _run(command: list[str], run_dir: Path | None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ |= {"PYTHONPATH": str(HERE.parents[1]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environ.pop("GPUTRAIN_RUN_DIR", None)
    if run_dir is not None:
        environ["GPUTRAIN_RUN_DIR"] = str(run_dir)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)


def _events(run_dir: Path, rank: int) -> list[AnyEvent]:
    return list(decode_events(RunDir(run_dir).rank_events(rank).read_bytes()))


def _steps(run_dir: Path, rank: int) -> list[Step]:
    return [event for event in _events(run_dir, rank) if isinstance(event, Step)]


def _check_two_ranks(run_dir: Path) -> None:
    for rank in (0, 1):
        steps = _steps(run_dir, rank)
        assert sum(event.steps for event in steps) == 12
        assert steps[-1].step == 12
        assert steps[-1].epoch == 2
        assert sum(event.samples for event in steps) == 96
        assert sum(event.tokens or 0 for event in steps) == 960
        assert all(event.loss is not None and event.lr == 0.1 for event in steps)
        # Between the end of the first step and that of the last lies an evaluation of 500 ms, which is in none.
        assert steps[0].steps == 1
        in_steps_ms = sum((event.step_ms or 0.0) * event.steps for event in steps[1:])
        assert in_steps_ms <= 1e3 * (steps[-1].time - steps[0].time) - 495
        states = [event.state for event in _events(run_dir, rank) if isinstance(event, RankState)]
        assert states == ["training", "finished"]
    prompt, late = _steps(run_dir, 0)[2:], _steps(run_dir, 1)[2:]
    data = [
        statistics.median(event.data_ms for event in steps if event.data_ms is not None) for steps in (prompt, late)
    ]
    assert data[1] > data[0] + 70, "rank 1 waits for its data"
    waits = [
        statistics.median(event.sync_exposed_ms for event in steps if event.sync_exposed_ms is not None)
        for steps in (prompt, late)
    ]
    assert waits[0] > waits[1] + 50, "and rank 0 waits for rank 1"
    checksums = [[event for event in _events(run_dir, rank) if isinstance(event, Checksum)] for rank in (0, 1)]
    assert [event.step for event in checksums[0]][:6] == [1, 2, 3, 4, 5, 10], "and at the end"
    assert [event.parameters for event in checksums[0]] == [event.parameters for event in checksums[1]]


def _beside_a_trainer(folder: Path) -> str:
    """Return a copy of the script, beside which there is a module of the name of ours."""
    (folder / "trainer.py").write_text("OWN = True\n")
    return str(shutil.copy(SCRIPT, folder))


@pytest.mark.timing
def test_a_script_under_torchrun_beside_a_trainer_of_its_own_is_recorded(tmp_path: Path) -> None:
    script, run_dir = _beside_a_trainer(tmp_path), tmp_path / "run"
    done = _run([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", script], run_dir)
    assert done.returncode == 0, done.stderr
    _check_two_ranks(run_dir)
    assert [event.local_rank for event in _events(run_dir, 1) if isinstance(event, RankState)] == [1, 1]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("command", ["spawn", "trainer"])
def test_a_script_beside_a_trainer_of_its_own_is_recorded(tmp_path: Path, command: str) -> None:
    script, run_dir = _beside_a_trainer(tmp_path), tmp_path / "run"
    launcher = [sys.executable, "-P", "-m", "trainer", "--cpu", "--distributed-world-size", "2"]
    words = {
        "spawn": [sys.executable, script, "spawn", str(tmp_path / "store")],
        "trainer": [*launcher, "--script", script, "--run-dir", str(run_dir)],
    }[command]
    done = _run(words, None if command == "trainer" else run_dir)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert sum(event.tokens or 0 for event in _steps(run_dir, rank)) == 960, "given to report()"
        assert sum(event.steps for event in _steps(run_dir, rank)) == 12


@pytest.mark.timing
def test_a_script_under_mp_spawn_is_recorded(tmp_path: Path) -> None:
    done = _run([sys.executable, str(SCRIPT), "spawn", str(tmp_path / "store")], tmp_path)
    assert done.returncode == 0, done.stderr
    _check_two_ranks(tmp_path)


@pytest.mark.timing
def test_a_script_in_one_process_is_recorded_and_its_failure_too(tmp_path: Path) -> None:
    done = _run([sys.executable, str(SCRIPT), "fail"], tmp_path)
    assert done.returncode == 1
    assert "no more data" in done.stderr
    steps = _steps(tmp_path, 0)
    assert sum(event.steps for event in steps) == 12
    assert all(event.sync_ms is None for event in steps)
    assert all(event.backward_ms is not None for event in steps)
    state, failure = _events(tmp_path, 0)[-2:]
    assert isinstance(state, RankState)
    assert isinstance(failure, Failure)
    assert (state.state, failure.message, failure.step) == ("failed", "ValueError: no more data", 12)
    assert "in train" in (failure.traceback or "")


def test_without_a_run_directory_nothing_is_hooked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = []
    for kind, names in ((nn.Module, ("register_forward_pre_hook", "register_forward_hook")),
                        (torch.optim.Optimizer, ("register_step_pre_hook", "register_step_post_hook"))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(kind, name, lambda *_, name=name, **__: hooked.append(name))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.ones(1, 2)]
    with watch(model, optimizer, environ={}) as watched:
        assert watched.batches(loader) is loader
        watched.report(loss=1.0)
    assert hooked == []


def test_hooks_are_gone_after_the_block_and_a_loader_keeps_its_length(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, environ={"GPUTRAIN_RUN_DIR": str(tmp_path), "RANK": "3"}, first_step=7) as watched:
        assert len(watched.batches([1, 2, 3])) == 3  # type: ignore[arg-type]
        model(torch.ones(5, 2)).sum().backward()
        model(torch.ones(5, 2)).sum().backward()
        optimizer.step()
    model(torch.ones(5, 2)).sum().backward()
    optimizer.step()
    assert watched.step == 8
    (step,) = _steps(tmp_path, 3)
    assert (step.step, step.samples, step.rank) == (8, 10, 3), "micro-steps add up"


def test_a_run_directory_that_cannot_be_written_is_reported_and_the_script_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    model = nn.Linear(2, 2)
    with watch(model, torch.optim.SGD(model.parameters()), environ={"GPUTRAIN_RUN_DIR": str(file)}) as watched:
        assert watched.step == 0
    assert f"not recording, GPUTRAIN_RUN_DIR={file}" in capsys.readouterr().err


class OwnOptimizer:
    """No ``torch.optim.Optimizer``."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter -= parameter.grad


class InheritingOptimizer(torch.optim.Optimizer):
    """Keeps no learning rate in its groups."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        OwnOptimizer(iter(self.param_groups[0]["params"])).step()


class HalfOptimizer(torch.optim.Optimizer):
    """Inherits, and does not call ``__init__`` of its base."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.own = OwnOptimizer(parameters)

    def step(self, closure: Any = None) -> None:
        self.own.step()


@pytest.mark.parametrize("kind", [OwnOptimizer, HalfOptimizer])
def test_an_optimizer_that_takes_no_hooks_is_said_once_and_the_script_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    model, loader = nn.Linear(2, 2), [torch.ones(1, 2)] * 3
    before, callbacks = model.weight.detach().clone(), list(gc.callbacks)
    optimizer = kind(model.parameters())
    with watch(model, optimizer, environ={"GPUTRAIN_RUN_DIR": str(tmp_path), "RANK": "0"}) as watched:
        assert watched.batches(loader) is loader
        for batch in loader:
            model(batch).sum().backward()
            watched.report(loss=1.0, accuracy=0.5)
            optimizer.step()
    assert not torch.equal(model.weight, before)
    assert gc.callbacks == callbacks
    events = _events(tmp_path, 0)
    (found,) = [event for event in events if isinstance(event, Finding)]
    assert (found.kind, found.cause, found.severity) == ("not_measured", "no_steps", "warning")
    assert [event.state for event in events if isinstance(event, RankState)] == ["training", "finished"]
    assert capsys.readouterr().err == (
        "gputrain: the optimizer given to watch() is no torch.optim.Optimizer, so nothing of this training is measured"
        f"; let {kind.__name__} inherit from it, with super().__init__(parameters, defaults)\n"
    )


def test_an_optimizer_that_inherits_is_measured_without_a_learning_rate_and_without_a_loss(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = InheritingOptimizer(model.parameters())
    with watch(model, optimizer, environ={"GPUTRAIN_RUN_DIR": str(tmp_path), "RANK": "0"}) as watched:
        for batch in watched.batches([torch.ones(1, 2)] * 3):
            model(batch).sum().backward()
            optimizer.step()
    steps = _steps(tmp_path, 0)
    assert sum(step.steps for step in steps) == 3
    assert {step.lr for step in steps} == {None}
    (found,) = [event for event in _events(tmp_path, 0) if isinstance(event, Finding)]
    assert found.message == "the loss: none was given to watched.report (loss=…, before the optimizer's step)"


PAGE_SCRIPT = blocks("scripts", "python")[0]


def test_the_scripts_page_shows_how_a_rank_takes_its_own_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its example, on ranks of which one computes three times as long for a sample."""
    backward = "        loss.backward()\n"
    slowed = PAGE_SCRIPT.replace(backward, f"        time.sleep(shares[rank] * (1 + 2 * rank) * 4e-4)\n{backward}")
    assert slowed != PAGE_SCRIPT
    (tmp_path / "train_shares.py").write_text("import time\n" + slowed)
    recipe = f'[[cluster.nodes]]\ncpu_ranks = 2\n[train]\nscript = "{tmp_path}/train_shares.py"\n'
    (tmp_path / "shares.toml").write_text(f'name = "shares"\n{recipe}')
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    done = _run([sys.executable, "-m", "gputrain_tui", "run", str(tmp_path / "shares.toml")], None)
    assert done.returncode == 0, done.stderr
    assert "with shares 4" in done.stderr
    (record,) = (tmp_path / "home" / "runs").iterdir()
    titles, *ranks = done.stdout.splitlines()[:3]
    at = titles.index("share") + len("share")
    assert int(ranks[0][:at].split()[-1]) + int(ranks[1][:at].split()[-1]) == 64
    changes = [event for event in _events(record, 0) if isinstance(event, ShareChange)]
    assert (changes[0].shares, changes[0].cause, changes[0].previous) == ([32, 32], "start", [])
    assert not [event for event in _events(record, 1) if isinstance(event, ShareChange)]
    first, *others = changes[1:]
    assert (first.step, first.cause, first.previous) == (21, "measured", [32, 32])
    assert first.shares[0] + first.shares[1] == 64
    assert 42 <= first.shares[0] <= 52, "three times as fast, but for what does not depend on samples"
    assert first.slowest_ms is not None
    assert first.expected_ms is not None
    assert first.expected_ms < 0.7 * first.slowest_ms
    (measured,) = [event for event in others if event.step == 21]
    assert measured.measured_ms is not None
    assert measured.measured_ms < 0.8 * first.slowest_ms
    taken = [sum(event.samples or 0 for event in _steps(record, rank) if 20 < event.step <= 40) for rank in (0, 1)]
    assert taken[0] > 2 * taken[1]


def test_without_a_run_directory_shares_are_equal_and_too_small_a_batch_is_refused() -> None:
    model = nn.Linear(2, 2)
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), environ={}) as watched:
        assert watched.shares(5) == (5,)
        with pytest.raises(ValueError, match="a global batch of 0 samples is too small for 1 ranks"):
            watched.shares(0)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


def told_shares(rank: int, world_size: int, more: int) -> str:
    model = nn.Linear(2, 2)
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), environ={}) as watched:
        try:
            return str(watched.shares(9 + more * rank))
        except ValueError as refused:
            return str(refused)


def test_ranks_that_ask_for_shares_of_different_global_batches_are_refused(two_ranks: Gang) -> None:
    assert two_ranks.run(told_shares, 0) == ["(5, 4)"] * 2
    line = "the ranks give different global batches to shares(): 9, 12 samples"
    assert two_ranks.run(told_shares, 3) == [line] * 2
