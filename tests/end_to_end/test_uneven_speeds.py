"""The finding on a rank that is slower for real, and what its advice then brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from text_cache import with_task_options
from waiting import LIMIT_S

TASK = Path(__file__).parents[1] / "support" / "slowed_task.py"
RECIPE = f"""
[[cluster.nodes]]
cpu_ranks = 2
[train]
task = "{TASK}:SlowedTask"
batch_size = 12
max_updates = 120
optimizer = "sgd"
lr = 0.002
[task]
sample_ms = "2,6"   # 12 samples in 24 and 72 ms; 18 and 6 samples in 36 ms
in_both = true
"""


def run(tmp_path: Path, name: str, *settings: str) -> dict[str, Any]:
    """Run the recipe and return its entry in ``gputrain runs --json``."""
    (tmp_path / f"{name}.toml").write_text(f'name = "{name}"{RECIPE}')
    environ = {**os.environ, "GPUTRAIN_HOME": str(with_task_options(tmp_path / "home")), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "gputrain_tui"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [*command, "run", str(tmp_path / f"{name}.toml"), *words],
        env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([*command, "runs", "--json"], env=environ, capture_output=True, text=True, check=True)
    return next(entry for entry in json.loads(listed.stdout) if entry["recipe"] == name)


@pytest.mark.timing
def test_a_slower_rank_is_named_with_a_step_time_that_its_advice_then_brings(tmp_path: Path) -> None:
    equal = run(tmp_path, "equal")
    (found,) = [finding for finding in equal["findings"] if finding["kind"] == "uneven_speeds"]
    assert found["ranks"] == [1]
    evidence = found["evidence"]
    assert evidence["most_samples"] == 12
    assert evidence["least_samples"] == pytest.approx(4, abs=2)
    # The slower rank alone takes 72 ms, and 36 ms with its share; steps have more to do than that.
    saved_ms = evidence["step_ms"] - evidence["balanced_step_ms"]
    assert saved_ms == pytest.approx(36, abs=12)
    balanced = run(tmp_path, "balanced", "train.batch_size=balanced", "train.global_batch_size=24")
    assert not [finding for finding in balanced["findings"] if finding["kind"] == "uneven_speeds"]
    assert balanced["shares"] == pytest.approx([18, 6], abs=2)
    promised = evidence["step_ms"] / evidence["balanced_step_ms"]
    assert balanced["samples_per_s"] / equal["samples_per_s"] > 1 + (promised - 1) / 2, evidence
    assert balanced["loss"] == pytest.approx(equal["loss"], rel=1e-5)
