"""Small trainings with real ranks, and their results."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_log import newest
from forked_trainer import ForkedTrainer
from torch import Tensor
from waiting import LIMIT_S

TASK = f"{Path(__file__).with_name('tiny_task.py')}:TinyTask"


ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RANK", "WORLD_SIZE"))}
ENVIRON |= {"GLOO_SOCKET_IFNAME": "lo"}


class TrainingResult:
    """Exit code, output, events and weights of a finished ``python -m trainer``."""

    def __init__(self, run_dir: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.output = done.stdout + done.stderr
        self.run_dir = run_dir
        self.events: list[dict[str, Any]] = []
        for file in sorted(run_dir.glob("events/*.ndjson")):
            self.events += [json.loads(line) for line in file.read_text().splitlines()]
        self.events.sort(key=lambda event: float(event["time"]))

    def events_of(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [e for e in self.events if e["type"] == kind and (rank is None or e.get("rank") == rank)]

    def sum_of(self, value: str, rank: int, *, after: int = 0) -> float:
        """Return the sum of a value over the steps, which is independent of the number of steps per event."""
        return sum(event[value] * event["steps"] for event in self.events_of("step", rank) if event["step"] > after)

    def curve(self) -> list[float]:
        """Return the loss of each step: the mean over the ranks, whose batches have equal sizes."""
        losses: dict[int, list[float]] = {}
        for event in self.events_of("step"):
            assert event["steps"] == 1
            losses.setdefault(event["step"], []).append(event["loss"])
        return [statistics.fmean(losses[step]) for step in sorted(losses)]

    @property
    def parameters(self) -> Tensor:
        found = newest(self.run_dir / "checkpoints")
        assert found is not None
        return torch.cat([tensor.flatten().double() for tensor in found[1]["model"].values()])


def train(run_dir: Path, *flags: object, ranks: int = 1, own: Sequence[object] = ()) -> TrainingResult:
    """Train with one process per rank, each started by its own command, with a flag of its own if there are some."""
    words = ["--task", TASK, "--cpu", "--run-dir", str(run_dir), "--threads", "1", *map(str, flags)]
    if ranks == 1:
        return TrainingResult(run_dir, ForkedTrainer(words, environ=ENVIRON).finish())
    with tempfile.TemporaryDirectory() as folder:
        words += ["--distributed-no-spawn", "--distributed-world-size", str(ranks)]
        words += ["--distributed-init-method", f"file://{folder}/rendezvous", "--distributed-rank"]
        each = [[*words, str(rank), *map(str, own[rank : rank + 1])] for rank in range(ranks)]
        begun = [ForkedTrainer(command, environ=ENVIRON) for command in each]
        done = [process.finish() for process in begun]
    code = max(ended.returncode for ended in done)
    output = "".join(ended.stdout + ended.stderr for ended in done)
    return TrainingResult(run_dir, subprocess.CompletedProcess(words, code, output, ""))


def train_spawned(run_dir: Path, *flags: object, ranks: int) -> TrainingResult:
    """Train with one command: its node agent starts the ranks."""
    words = ["--task", TASK, "--cpu", "--run-dir", str(run_dir), "--threads", "1"]
    words += ["--distributed-world-size", str(ranks), *map(str, flags)]
    command = [sys.executable, "-m", "trainer", *words]
    return TrainingResult(
        run_dir, subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRON)
    )
