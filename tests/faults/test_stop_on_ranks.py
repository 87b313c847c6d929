"""Stopping real ranks: the trained state is saved, and a rank that hangs delays no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_log import newest
from signals import is_pending
from trained import TASK, train
from waiting import LIMIT_S, until

from trainer.checkpoint import load
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import RankState, RunDir, Validation, decode_events
from trainer.host.ports import free_port
from trainer.host.processes import descendants

FLAGS = ["--batch-size", "5", "--dropout", "0.3", "--lr-scheduler", "cosine", "--total-num-update", "5000"]
FLAGS += ["--save-every-epochs", "0", "--valid-every-epochs", "0", "--valid-every-updates", "7", "--no-test"]


def begin(run_dir: Path, *flags: object, ranks: int = 2, node: int = 0) -> subprocess.Popen[str]:
    words = ["--task", TASK, "--cpu", "--run-dir", str(run_dir), "--threads", "1", "--node", str(node), *FLAGS]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *words, "--distributed-world-size", str(ranks), *map(str, flags)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "GPUTRAIN"))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=LIMIT_S)
    return process.returncode, stderr


def await_steps(run_dir: Path, ranks: int = 2) -> None:
    files = [RunDir(run_dir).rank_events(rank) for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_bytes().count(b'"step"') > 2 for file in files))


def outcome(run_dir: Path, node: int = 0) -> NodeOutcome:
    return msgspec.json.decode(RunDir(run_dir).node_result(node).read_bytes(), type=NodeOutcome)


def pid_of(run_dir: Path, rank: int) -> int:
    events = decode_events(RunDir(run_dir).node_events(0).read_bytes())
    return next(event.pid or 0 for event in events if isinstance(event, RankState) and event.rank == rank)


@pytest.mark.parametrize(
    ("ranks", "number"), [pytest.param(1, signal.SIGINT, marks=pytest.mark.slow), (2, signal.SIGTERM)]
)
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path: Path, ranks: int, number: signal.Signals) -> None:
    process = begin(tmp_path / "first", "--max-updates", 1_000_000, ranks=ranks)
    await_steps(tmp_path / "first", ranks)
    process.send_signal(number)
    code, stderr = end(process)
    reported = outcome(tmp_path / "first")
    assert reported.stopped_at is not None
    path = tmp_path / "first" / "checkpoints" / f"step_{reported.stopped_at:08}.pt"
    assert (code, reported.exit_code, reported.failure, reported.saved) == (130, 130, None, str(path))
    assert f"trainer: stopped at step {reported.stopped_at}, saved {path}" in stderr
    assert load(path)["updates"] == reported.stopped_at
    flags = ["--task", TASK, *FLAGS, "--max-updates", reported.stopped_at + 9]
    assert train(tmp_path / "second", *flags, "--resume", path, ranks=ranks).code == 0
    assert train(tmp_path / "straight", *flags, ranks=ranks).code == 0
    ends = [newest(tmp_path / name / "checkpoints") for name in ("second", "straight")]
    states = [found[1] for found in ends if found is not None]
    assert states[0]["updates"] == states[1]["updates"] == reported.stopped_at + 9
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name])
    assert states[0]["best"] == states[1]["best"]
    seen = [
        [event.step for event in decode_events(RunDir(tmp_path / name).rank_events(0).read_bytes())
         if isinstance(event, Validation) and event.split == "valid"]
        for name in ("first", "second", "straight")
    ]  # fmt: skip
    assert seen[0] + seen[1] == seen[2], "each validation once"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGUSR1]
)
def test_a_signal_to_every_process_of_a_job_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = begin(tmp_path, "--max-updates", 1_000_000, "--num-workers", 1)
    await_steps(tmp_path)
    # As Slurm without cgroups ends a job, or a terminal its group: also the fork server, and what reads the data.
    pids = [*descendants(process.pid), process.pid]
    assert len(pids) >= 7
    for pid in (*pids, *pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    code, stderr = end(process)
    reported = outcome(tmp_path)
    assert reported.stopped_at is not None
    path = tmp_path / "checkpoints" / f"step_{reported.stopped_at:08}.pt"
    assert (code, reported.exit_code, reported.failure, reported.saved) == (130, 130, None, str(path))
    assert f"trainer: stopped at step {reported.stopped_at}, saved {path}" in stderr
    assert load(path)["updates"] == reported.stopped_at


def test_a_sigterm_to_one_rank_stops_all_ranks_in_order(tmp_path: Path) -> None:
    process = begin(tmp_path, "--max-updates", 1_000_000)
    await_steps(tmp_path)
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
    code, _ = end(process)
    reported = outcome(tmp_path)
    assert (code, reported.failure, reported.unanswered) == (130, None, [])
    assert reported.saved is not None


def test_a_validation_is_broken_off_and_made_up_for(tmp_path: Path) -> None:
    flags = ("--valid-samples", 200_000, "--valid-batch-size", 1, "--max-updates", 8)
    process = begin(tmp_path / "first", *flags)
    events = RunDir(tmp_path / "first").rank_events(1)
    until(lambda: events.exists() and b'"validating"' in events.read_bytes())
    process.terminate()
    assert end(process)[0] == 130
    assert outcome(tmp_path / "first").stopped_at == 7
    more = ("--max-updates", 8, "--resume", tmp_path / "first" / "checkpoints")
    assert train(tmp_path / "second", *FLAGS, *more, ranks=2).code == 0
    found = decode_events(RunDir(tmp_path / "second").rank_events(0).read_bytes())
    assert [event.step for event in found if isinstance(event, Validation)] == [7, 8]


def test_nodes_stop_after_the_same_update_whichever_of_them_gets_the_signal(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--distributed-init-method", url, "--distributed-gpus", 1, "--max-updates", 1_000_000)
    nodes = [begin(tmp_path, *flags, "--distributed-rank", node, node=node) for node in range(2)]
    await_steps(tmp_path)
    nodes[1].terminate()
    assert [end(node)[0] for node in nodes] == [130, 130]
    reported = [outcome(tmp_path, node) for node in range(2)]
    assert reported[0].stopped_at == reported[1].stopped_at
    assert [one.saved is not None for one in reported] == [True, False], "rank 0 saves"


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_grace(tmp_path: Path) -> None:
    process = begin(tmp_path, "--max-updates", 1_000_000, "--stop-grace", 1)
    await_steps(tmp_path)
    os.kill(pid_of(tmp_path, 1), signal.SIGSTOP)
    signalled_at = time.monotonic()
    process.terminate()
    code, stderr = end(process)
    assert time.monotonic() - signalled_at >= 1.0
    assert code == 130
    assert outcome(tmp_path).unanswered == [0, 1], "one hangs, and one waits for it in a collective"
    assert "killed because they did not respond: ranks 0, 1; no process is left" in stderr


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_sigterm_does_not_lose_the_checkpoint(tmp_path: Path, ranks: int) -> None:
    process = begin(tmp_path, "--max-updates", 1_000_000, ranks=ranks)
    await_steps(tmp_path, ranks)
    for _ in range(2):
        process.terminate()
        until(lambda: not is_pending(process.pid, signal.SIGTERM))
    assert end(process)[0] == 130
    assert outcome(tmp_path).saved is not None
