"""Time from the Launch key, with a warm pool, to the first optimizer step of both ranks, compared with torchrun.

The benchmark does the work of the key: validate the recipe against the machine again, then launch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gputrain_tui.console.validate_recipe import validate_recipe
from gputrain_tui.lifecycle.start import launch
from gputrain_tui.lifecycle.warm_pool import WarmPool
from trainer.contract.record import RunDir, Step, decode_events

pytestmark = pytest.mark.benchmark

PAIRS = 5
BIN = Path(sys.executable).parent
RECIPE = """\
name = "latency"
[[cluster.nodes]]
cpu_ranks = 2
[train]
task = "lm"
batch_size = 8
max_updates = 3
[task]
data = "{data}"
context = 64
layers = 2
dim = 64
heads = 4
"""


def test_from_the_launch_key_the_first_step_comes_in_at_most_0_15_of_torchruns_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPUTRAIN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 2000)
    recipe = RECIPE.format(data=text)
    launches, torchruns = [], []
    for pair in range(PAIRS + 1):
        out = tmp_path / str(pair)
        out.mkdir()
        torchruns.append(_torchrun(text, out))
        launches.append(_launched(recipe))
    # The first pair fills the page cache.
    ratios = [own / torchrun for own, torchrun in zip(launches[1:], torchruns[1:], strict=True)]
    print(
        f"\nfrom the key {statistics.median(launches[1:]):.3f} s, torchrun {statistics.median(torchruns[1:]):.2f} s, "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    assert statistics.median(ratios) <= 0.15


def _torchrun(text: Path, out: Path) -> float:
    script = Path(__file__).with_name("ddp_script.py")
    start = time.time()
    subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, "--data", text, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,  # torch 2.13's gloo may abort at exit after a successful run
    )
    return max(float((out / f"first_step.{rank}").read_text()) for rank in (0, 1)) - start


def _launched(recipe: str) -> float:
    warm = WarmPool()
    warm.open()
    assert warm.wait(60)
    start = time.time()
    found = validate_recipe(recipe, name="latency.toml", settings=[], task="lm")
    assert found.prepared is not None, found.problem
    run, supervisor = launch(found.prepared, leased=False, warm=warm)
    assert supervisor.wait(60) == 0
    return max(_first_step(run.dir, rank) for rank in (0, 1)) - start


def _first_step(run_dir: RunDir, rank: int) -> float:
    events = decode_events(run_dir.rank_events(rank).read_bytes())
    return min(event.time for event in events if isinstance(event, Step))
