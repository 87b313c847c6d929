"""A model that does not fit a rank's memory: DDP ends with a message, ``--strategy fsdp`` trains it.

The limit is RLIMIT_DATA of each rank, from the building of its model on: with that of a cgroup the kernel would kill
the rank in place of the message.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_log import newest
from trained import TrainingResult, train

from trainer.contract.errors import ExitCode

LIMIT_MIB = 140
"""DDP takes 175: four times the model's 25, and 70 for all else. Two ranks that divide the model take 105."""
TASK = f"{Path(__file__).parents[1] / 'support/limited_lm.py'}:LimitedLm"
WIDTHS = {"single": 256, "double": 160}
"""Widths of the models, which take 25 and 20 MiB."""


def trained(folder: Path, strategy: str, ranks: int, *words: object, precision: str, limit_mib: int) -> TrainingResult:
    """Train on batches of 12 samples, three to an epoch."""
    data = folder.parent / "text.txt"
    data.write_bytes((bytes(range(32, 122)) * 9)[:584])
    model = ("--context", 16, "--dim", WIDTHS[precision], "--layers", 8, "--heads", 2, "--sample-bytes", 0)
    request = ("--task", TASK, "--data", data, "--valid-fraction", 0, *model, *["--double"] * (precision == "double"))
    steps = ("--batch-size", 12 // ranks, "--max-epochs", 2, "--lr", "3e-4", "--save-every-epochs", 0, *words)
    return train(folder, *request, "--strategy", strategy, "--limit-mib", limit_mib, *steps, ranks=ranks)


def state_and_loss(done: TrainingResult, ranks: int) -> tuple[dict[str, object], float]:
    """Return the last checkpoint, and the sum over two steps of the mean loss of all ranks, whose batches are equal."""
    assert done.code == ExitCode.FINISHED, done.output
    found = newest(done.run_dir / "checkpoints")
    assert found is not None
    assert sum(event["samples"] for event in done.events_of("step")) == 2 * 12
    return found[1], sum(done.sum_of("loss", rank) for rank in range(ranks)) / ranks


def test_ddp_runs_out_of_memory_with_one_line_that_names_the_other_strategy(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", "ddp", 2, precision="single", limit_mib=LIMIT_MIB)
    assert done.code == ExitCode.FAILED
    assert "or --strategy fsdp, which divides the model among the ranks" in done.output
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))


@pytest.mark.parametrize(("precision", "exact", "worlds"), [("single", 1e-6, (2, 4)), ("double", 1e-12, (3,))])
def test_other_ranks_under_the_limit_go_on_and_end_where_ddp_without_it_does(
    tmp_path: Path, precision: str, exact: float, worlds: tuple[int, ...]
) -> None:
    within_epoch = ("--max-updates", 2)
    begun = trained(tmp_path / "begun", "fsdp", 2, *within_epoch, precision=precision, limit_mib=LIMIT_MIB)
    state_and_loss(begun, 2)
    more = ("--resume", begun.run_dir / "checkpoints", "--max-updates", 4)
    ddp = trained(tmp_path / "ddp", "ddp", 2, *more, precision=precision, limit_mib=0)
    expected, expected_loss = state_and_loss(ddp, 2)
    for ranks in worlds:
        done = trained(tmp_path / f"fsdp{ranks}", "fsdp", ranks, *more, precision=precision, limit_mib=LIMIT_MIB)
        saved, loss = state_and_loss(done, ranks)
        assert saved["position"] == expected["position"]  # each sample once
        assert loss == pytest.approx(expected_loss, rel=exact)
        for name, weight in expected["model"].items():
            torch.testing.assert_close(saved["model"][name], weight, rtol=0, atol=exact)
