"""A script that was never touched, started without the console: by torchrun, and by the trainer typed by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gputrain_tui.history.run_folders import open_directory
from trainer.contract.record import AnyEvent, RankState, RunDir, Step, decode_events

HERE = Path(__file__).parent
SCRIPT = HERE.parents[0] / "support" / "plain_script.py"
STEPS = 8
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")
BY_HAND = ("trainer", "--distributed-world-size", "2")
RESTARTED = "import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(3)\n"


def run(folder: Path, launcher: Sequence[str], script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    theirs = ("RANK", "WORLD_SIZE", "GPUTRAIN_LEASE", "GPUTRAIN_RUN_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    words = ["--script", str(script), "--cpu", "--run-dir", "run", *flags, "--", "--epochs", "3"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def events(folder: Path, rank: int) -> list[AnyEvent]:
    return list(decode_events(RunDir(folder / "run").rank_events(rank).read_bytes()))


def check_outcome(tmp_path: Path, done: subprocess.CompletedProcess[str]) -> None:
    """The run that torchrun started has ended as its ranks have, and says where its log is."""
    assert done.stderr.count(f"trainer: what the script prints: {tmp_path}/run/logs, a file for each rank\n") == 1
    found = open_directory(tmp_path / "run")
    times = [event.time for rank in (0, 1) for event in events(tmp_path, rank)]
    assert (found.state, found.status.exit_code, found.status.step) == ("finished", 0, STEPS)
    assert found.status.ended == max(times)
    assert 0 <= min(times) - found.status.started < 5, "the first process began before its first event"


def states(folder: Path, rank: int) -> list[str]:
    return [event.state for event in events(folder, rank) if isinstance(event, RankState)]


@pytest.mark.parametrize(
    ("launcher", "method"),
    [
        pytest.param(TORCHRUN, "forkserver", id="torchrun-forkserver"),
        pytest.param(BY_HAND, "spawn", id="by hand-spawn"),
        pytest.param(TORCHRUN, "spawn", id="torchrun-spawn", marks=pytest.mark.slow),
        pytest.param(BY_HAND, "forkserver", id="by hand-forkserver", marks=pytest.mark.slow),
    ],
)
def test_losses_phases_and_synchronisation_of_both_ranks_are_on_record(
    tmp_path: Path, launcher: Sequence[str], method: str
) -> None:
    done = run(tmp_path, launcher, SCRIPT, "--start-method", method)
    assert done.returncode == 0, done.stderr
    losses: list[list[float | None]] = []
    for rank in (0, 1):
        assert states(tmp_path, rank) == ["training", "finished"]
        assert f"rank {rank} of 2 on {rank} ['--epochs', '3']\n" in RunDir(tmp_path / "run").rank_log(rank).read_text()
        steps = [event for event in events(tmp_path, rank) if isinstance(event, Step)]
        assert sum(event.steps for event in steps) == STEPS
        last = steps[-1]
        assert None not in (last.data_ms, last.forward_ms, last.backward_ms, last.optimizer_ms, last.sync_exposed_ms)
        losses.append([loss for event in steps for loss in (event.losses or [event.loss])])
    assert losses[0] == pytest.approx(losses[1]), "both ranks have the same points"
    node = decode_events(RunDir(tmp_path / "run").node_events(0).read_bytes())
    spawned = [event.rank for event in node if isinstance(event, RankState) and event.state == "spawned"]
    assert sorted(spawned) == [0, 1]
    if launcher == TORCHRUN:
        check_outcome(tmp_path, done)


def test_a_script_that_torchrun_starts_again_joins_in_its_new_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTARTED + SCRIPT.read_text())
    done = run(tmp_path, (*TORCHRUN[:1], "--max-restarts", "1", *TORCHRUN[1:]), script)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert states(tmp_path, rank)[-2:] == ["training", "finished"]
        assert sum(event.steps for event in events(tmp_path, rank) if isinstance(event, Step)) == STEPS


def test_a_script_that_fails_under_torchrun_fails_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no data')")
    done = run(tmp_path, TORCHRUN, script)
    assert done.returncode == 1
    assert "ValueError: no data" in done.stderr
