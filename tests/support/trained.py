"""What a training by ``python -m trainer`` leaves behind, for tests to look at."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import newest


class Trained:
    """What a finished `python -m trainer` left behind."""

    def __init__(self, run_dir: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.output = done.stdout + done.stderr
        self.run_dir = run_dir
        self.events: list[dict[str, Any]] = []
        for file in sorted(run_dir.glob("events/*.ndjson")):
            self.events += [json.loads(line) for line in file.read_text().splitlines()]
        self.events.sort(key=lambda event: float(event["time"]))

    def of(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [e for e in self.events if e["type"] == kind and (rank is None or e.get("rank") == rank)]

    def sum_of(self, value: str, rank: int, *, after: int = 0) -> float:
        """Over the steps; how many steps share an event depends on how fast they were, the sum does not."""
        return sum(event[value] * event["steps"] for event in self.of("step", rank) if event["step"] > after)

    def curve(self) -> list[float]:
        """The loss of each step: the mean over the ranks, whose batches are equally large."""
        losses: dict[int, list[float]] = {}
        for event in self.of("step"):
            assert event["steps"] == 1
            losses.setdefault(event["step"], []).append(event["loss"])
        return [statistics.fmean(losses[step]) for step in sorted(losses)]

    @property
    def parameters(self) -> Tensor:
        found = newest(self.run_dir / "checkpoints")
        assert found is not None
        return torch.cat([tensor.flatten().double() for tensor in found[1]["model"].values()])
