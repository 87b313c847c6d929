"""A script whose ranks have more and fewer batches, in DDP's ``join()``: it ends, and no rank is blamed for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import AnyEvent, Finding, RankState, Step

STEPS = (30, 90)
SCRIPT = f"""\
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with model.join(divide_by_initial_world_size=False):
    for _ in range({STEPS}[dist.get_rank()]):
        optimizer.zero_grad()
        time.sleep(0.02)
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
"""


def test_a_rank_that_runs_out_of_data_early_is_neither_late_nor_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "script.py").write_text(SCRIPT)
    recipe = tmp_path / "uneven.toml"
    recipe.write_text('name = "uneven"\n[[cluster.nodes]]\ncpu_ranks = 2\n[train]\nscript = "script.py"\n')
    words = [sys.executable, "-m", "gputrain_tui", "run", str(recipe)]
    done = subprocess.run(
        words, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    reader = RunReader(list_runs(tmp_path / "home" / "runs")[0].dir)
    events: list[AnyEvent] = []
    while batch := reader.poll():
        events += batch
    reader.close()
    for rank, steps in enumerate(STEPS):
        assert sum(each.steps for each in events if isinstance(each, Step) and each.rank == rank) == steps
        assert any(isinstance(each, RankState) and each.rank == rank and each.state == "finished" for each in events)
    # Before, the machine itself may have held a rank up.
    raised = [each for each in events if isinstance(each, Finding) and each.state == "raised"]
    after = [each for each in raised if each.step is None or each.step > STEPS[0]]
    assert [each.message for each in after if each.kind != "cpu_contention"] == []
