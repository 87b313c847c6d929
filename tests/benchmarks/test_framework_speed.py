"""Samples per second of recorded gputrain runs, compared with loops that users of other frameworks write.

Each is started with its usual command, on two ranks of one thread each; they alternate for several rounds, and a ratio
is taken within a round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.record import RunDir, Step, decode_events

pytestmark = pytest.mark.benchmark

DATA = Path(__file__).parents[3] / "shared/data"
ROUNDS = 5
WARM_UP = 30
"""Steps of each run that are not measured."""
TASKS: dict[str, dict[str, Any]] = {
    "docnn": {
        "task_options": {"train_path": str(DATA / "sst2/train.tsv"), "dropout": 0.4},
        "optimizer": {"name": "adam", "settings": {"lr": 1e-3, "weight_decay": 1e-5}},
        "batch_size": 16,
        "clip_norm": 0.0,
        "steps": 400,
    },
    "mnist": {
        "task_options": {"data": str(DATA / "mnist")},
        "optimizer": {"name": "adadelta", "settings": {"lr": 1.01}},
        "batch_size": 64,
        "clip_norm": 100.0,
        "steps": 100,
    },
    "lm": {
        "task_options": {
            "data": str(DATA / "tinyshakespeare/input.txt"), "context": 128, "dim": 128, "layers": 4, "heads": 4,
        },
        "optimizer": {"name": "adamw", "settings": {"lr": 2e-3, "weight_decay": 0.1}},
        "batch_size": 16,
        "clip_norm": 1.0,
        "steps": 40,
    },
    "masked_lm": {
        "task_options": {"data": "stdlib", "vocab_size": 4096, "preset": "tiny", "sequence_length": 128},
        "optimizer": {"name": "adamw", "settings": {"lr": 1e-3, "weight_decay": 0.01}},
        "batch_size": 16,
        "clip_norm": 1.0,
        "steps": 40,
    },
}  # fmt: skip


def gputrain_rate(request: dict[str, Any], folder: Path) -> float:
    settings = request["optimizer"]["settings"]
    words = ["--cpu", "--distributed-gpus", "2", "--threads", "1", "--run-dir", str(folder)]
    flags = {
        "task": request["task"],
        "batch-size": request["batch_size"],
        "optimizer": request["optimizer"]["name"],
        "lr": settings["lr"],
        "weight-decay": settings.get("weight_decay", 0.0),
        "clip-norm": request["clip_norm"],
        "max-updates": WARM_UP + request["steps"],
        "valid-every-epochs": 0,
        **{name.replace("_", "-"): value for name, value in request["task_options"].items()},
    }
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    subprocess.run([sys.executable, "-m", "trainer", *words], check=True, capture_output=True)
    events = decode_events(RunDir(folder).rank_events(0).read_bytes())
    steps = [event for event in events if isinstance(event, Step) and event.step >= WARM_UP]
    first, last = steps[0], steps[-1]
    return (last.step - first.step) * request["batch_size"] * 2 / (last.time - first.time)


def framework_rate(loop: str, request: dict[str, Any]) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("framework_loops.py")
    done = subprocess.run(
        [*command, str(script), loop, json.dumps(request)], check=True, capture_output=True, text=True
    )
    found: float = json.loads(done.stdout.strip().splitlines()[-1])["samples_per_s"]
    return found


@pytest.mark.skipif(not DATA.exists(), reason="needs the data sets")
@pytest.mark.parametrize("task", TASKS)
def test_we_are_ahead_of_each(tmp_path: Path, task: str) -> None:
    request = {"task": task, "warm_up": WARM_UP, **TASKS[task]}
    loops = ["ddp", *(name for name in ("accelerate", "lightning") if find_spec(name))]
    rates: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}
    for number in range(ROUNDS):
        rates["ours"].append(gputrain_rate(request, tmp_path / str(number)))
        for name in loops:
            rates[name].append(framework_rate(name, request))
    print("\n" + ", ".join(f"{task} {name}: {statistics.median(found):.0f} samples/s" for name, found in rates.items()))
    for name in loops:
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
        print(f"{task}: ours over {name} {ratio:.3f}")
        assert ratio > 1, name
