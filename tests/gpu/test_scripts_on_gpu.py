"""Unchanged scripts on one GPU with NCCL: what is measured, and that the script sees no difference."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trained import ENVIRON, TrainingResult

SCRIPT = Path(__file__).with_name("gpu_script.py")
ROOT = Path(__file__).parents[2]


class ScriptRun(TrainingResult):
    """A run of ``gpu_script.py``: its events, the weights at its end, and how long its steps took."""

    def __init__(self, folder: Path, way: str, *flags: str, steps: int = 60) -> None:
        folder.mkdir()
        weights = folder / "weights.pt"
        command = [sys.executable, "-m", "trainer", "--run-dir", str(folder), *flags, "--script", str(SCRIPT)]
        done = subprocess.run(
            [*command, "--", way, str(steps), str(weights)], capture_output=True, text=True, timeout=240,
            env=ENVIRON, cwd=ROOT,
        )  # fmt: skip
        super().__init__(folder, done)
        assert self.code == 0, self.output
        self.weights: list[torch.Tensor] = torch.load(weights)
        logs = "".join(path.read_text() for path in folder.glob("logs/*"))
        self.log = self.output + logs
        self.step_ms = float(re.search(r"ms a step: ([\d.]+)", self.log)[1])  # type: ignore[index]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "own collectives"])
def test_a_script_is_measured_and_sees_no_difference(tmp_path: Path, way: str) -> None:
    measured = ScriptRun(tmp_path / "measured", way)
    plain = ScriptRun(tmp_path / "plain", way, "--no-instrument")
    assert all(torch.equal(*pair) for pair in zip(measured.weights, plain.weights, strict=True))
    assert "not measured" not in measured.log
    steps = measured.events_of("step")
    assert sum(event["steps"] for event in steps) == 60
    for event in steps[5:]:
        assert event["memory_peak_bytes"] > 0
        assert all(event[f"{phase}_ms"] > 0 for phase in ("step", "forward", "backward", "optimizer"))
        parts = [event.get(f"{phase}_ms") or 0.0 for phase in ("data", "h2d", "forward", "backward", "optimizer")]
        assert sum(parts) + (event.get("sync_exposed_ms") or 0.0) <= event["step_ms"] * 1.01, event
        assert event["samples"] == 64 * event["steps"]


def test_what_a_graph_replays_is_not_measured_and_is_told(tmp_path: Path) -> None:
    measured = ScriptRun(tmp_path / "measured", "cuda graph", steps=150)
    plain = ScriptRun(tmp_path / "plain", "cuda graph", "--no-instrument", steps=150)
    assert all(torch.equal(*pair) for pair in zip(measured.weights, plain.weights, strict=True))
    assert sum(event["steps"] for event in measured.events_of("step")) == 3, "those before the graph was captured"
    assert [event["kind"] for event in measured.events_of("finding")] == ["not_measured"]


def test_collectives_of_a_script_are_told_by_group(tmp_path: Path) -> None:
    run = ScriptRun(tmp_path / "run", "own collectives")
    for event in run.events_of("step")[5:]:
        (group,) = event["groups"]
        assert group["operations"] == {"all_reduce": 17}, "one for each of 16 gradients, and one awaited late"
        assert group["bytes"] > 8 * 512 * 512 * 4
        assert 0 <= group["exposed_ms"] <= event["sync_exposed_ms"] * 1.001 <= event["step_ms"]


def test_measuring_costs_little(tmp_path: Path) -> None:
    for way in ("ddp", "own collectives", "fsdp2"):
        ratios = []
        for turn in range(3):
            on = ScriptRun(tmp_path / f"{way} {turn} on", way, steps=600).step_ms
            off = ScriptRun(tmp_path / f"{way} {turn} off", way, "--no-instrument", steps=600).step_ms
            ratios.append(off / on)
        ratio = statistics.median(ratios)
        print(f"{way}: {on:.3f} ms a step, {ratio:.3f} of the steps/s without measuring ({ratios})")
        assert ratio >= 0.7, "steps of 2 ms, which the host bounds"
