"""Every built-in task trains on two CPU ranks: real data files, the real loop, a real process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_group import Gang
from task_data import write_data

from trainer.contract.builtin_tasks import BUILT_IN
from trainer.tasks.registry import load_task


def train(rank: int, world_size: int, task_name: str, task_options: dict[str, Any], cache: str) -> dict[str, Any]:
    """Run on each rank: train for two epochs, and return what it recorded and where its parameters ended."""
    import os

    import torch
    from worker_contexts import worker_context

    from trainer.contract.options import Training
    from trainer.engine.loop import Loop

    os.environ["GPUTRAIN_CACHE"] = cache
    narration: list[str] = []
    kind = load_task(task_name)
    loop = Loop(
        kind(kind.Options(**task_options)),
        Training(task=task_name, batch_size=(6,), max_epochs=2, optimizer="adamw", lr=(3e-3,), save_every_epochs=0),
        worker_context(rank, world_size, print_line=narration.append),
    )
    outcome = loop.run()
    parameters = torch.cat([p.detach().flatten() for p in loop.raw_model.parameters()])
    return {
        "narration": narration,
        "updates": outcome.updates,
        "best": outcome.best.value,
        "parameters": parameters.double().sum().item(),
        "finite": bool(parameters.isfinite().all()),
    }


@pytest.mark.parametrize("task", BUILT_IN)
def test_a_built_in_task_trains_on_two_ranks_that_agree_in_the_end(two_ranks: Gang, tmp_path: Path, task: str) -> None:
    options = write_data(tmp_path, task)
    first, second = two_ranks.run(train, task, options, str(tmp_path / "cache"))
    assert first["finite"]
    assert first["updates"] == second["updates"] > 2
    assert first["parameters"] == second["parameters"]
    assert first["best"] == second["best"]
    assert any("valid" in line for line in first["narration"])
