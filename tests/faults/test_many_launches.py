"""A hundred short runs, one after the other: no false failure, nothing left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LAUNCHES = 100


def test_a_hundred_short_launches_succeed_and_leave_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "short"\n[[cluster.nodes]]\ncpu_ranks = 2\n'
        '[train]\ntask = "lm"\nbatch_size = 4\nmax_updates = 5\nthreads = 1\nsave_every_epochs = 0\n'
        f'[task]\ndata = "{text}"\ncontext = 16\ndim = 8\nlayers = 1\nheads = 1\n'
    )
    environment = {**os.environ, "GPUTRAIN_HOME": str(tmp_path / "home"), "GPUTRAIN_CACHE": str(tmp_path / "cache")}
    gputrain = Path(sys.executable).with_name("gputrain")
    for launch in range(LAUNCHES):
        done = subprocess.run([gputrain, "run", recipe, "--json"], env=environment, capture_output=True, timeout=300)
        assert done.returncode == 0, f"launch {launch}: {done.stderr.decode()}"
        events = [json.loads(line) for line in done.stdout.splitlines()]
        steps = {rank: sum(e["steps"] for e in events if e["type"] == "step" and e["rank"] == rank) for rank in (0, 1)}
        assert steps == {0: 5, 1: 5}, f"launch {launch}"
        pids = {event["pid"] for event in events if event["type"] == "rank_state"}
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], f"launch {launch}"
