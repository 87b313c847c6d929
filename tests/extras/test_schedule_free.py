"""`--optimizer schedulefree_adamw` against the package by hand, resumed, divided among ranks, and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import newest
from tiny_task import TinyOptions, TinyTask
from trained import ENVIRON, TASK, TrainingResult, train
from waiting import LIMIT_S

schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.1}
FLAGS = ("--optimizer", "schedulefree_adamw", "--lr", 0.02, "--adam-betas", "0.8,0.99", "--weight-decay", 0.1)


def by_hand(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Return the weights x and y after full-batch steps, and the loss of the validation data."""
    task = TinyTask(TinyOptions(double=True))
    torch.manual_seed(1)
    model = task.model()
    data = task.datasets()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), **SETTINGS)

    def loss(split: str) -> torch.Tensor:
        samples: Any = data[split]
        total, count, _ = task.loss(model, (samples.inputs, samples.targets))
        return total / count

    optimizer.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss("train").backward()
        optimizer.step()
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.eval()
    with torch.no_grad():
        return {name: weight.detach() for name, weight in model.named_parameters()}, trained, float(loss("valid"))


def saved(done: TrainingResult) -> dict[str, Any]:
    assert done.code == 0, done.output
    found = newest(done.run_dir / "checkpoints")
    assert found is not None
    return found[1]


@pytest.mark.parametrize("batch", ["50", "13,37"], ids=["one rank", "two uneven ranks"])
def test_steps_average_and_validation_are_those_of_the_package_by_hand(tmp_path: Path, batch: str) -> None:
    average, plain, valid_loss = by_hand(6)
    flags = (*FLAGS, "--double", "--batch-size", batch, "--max-updates", 6, "--valid-every-updates", 1)
    done = train(tmp_path, *flags, ranks=1 + batch.count(","))
    state = saved(done)
    for name, weight in average.items():
        torch.testing.assert_close(state["model"][name], weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(state["plain"][name], plain[name], rtol=0, atol=1e-12)
        assert not torch.allclose(weight, plain[name], rtol=0, atol=1e-6)
    assert done.events_of("validation")[-1]["loss"] == pytest.approx(valid_loss, rel=1e-12)


def test_a_resumed_training_is_equal_bit_for_bit_and_does_not_depend_on_its_validations(tmp_path: Path) -> None:
    flags = (*FLAGS, "--batch-size", 5, "--dropout", 0.3, "--warmup-updates", 6, "--max-epochs", 3)
    straight = train(tmp_path / "straight", *flags, ranks=2)
    often = ("--valid-every-updates", 1, "--save-every-updates", 1)
    first = train(tmp_path / "first", *flags, "--max-updates", 4, *often, ranks=2)
    assert first.code == 0, first.output
    second = train(tmp_path / "second", *flags, *often, "--resume", tmp_path / "first" / "checkpoints", ranks=2)
    expected, state = saved(straight), saved(second)
    for entry in ("model", "plain"):
        for name, weight in expected[entry].items():
            assert torch.equal(state[entry][name], weight), f"{entry} {name}"
    counted, resumed = expected["optimizer"]["param_groups"], state["optimizer"]["param_groups"]
    assert counted == resumed
    assert counted[0]["k"] == 15


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (FLAGS[:2], (), "its optimizer is not AdamW: it has k, weight_sum, lr_max, scheduled_lr"),
        ((), FLAGS[:2], "its optimizer is not AdamWScheduleFree: it has no r, k, warmup_steps"),
    ],
)
def test_another_optimizers_checkpoint_is_refused(
    tmp_path: Path, before: tuple[Any, ...], after: tuple[Any, ...], message: str
) -> None:
    first = train(tmp_path / "first", *before, "--max-updates", 2, "--batch-size", 25)
    assert first.code == 0, first.output
    again = train(tmp_path / "again", *after, "--max-updates", 4, "--resume", tmp_path / "first" / "checkpoints")
    assert again.code == 2
    assert message in again.output
    fresh = ("--max-updates", 4, "--resume", tmp_path / "first" / "checkpoints", "--reset-optimizer")
    done = train(tmp_path / "fresh", *after, *fresh)
    assert done.code == 0, done.output


def test_a_divided_model_makes_the_steps_of_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a plain sentence, and another one.\n" * 200)
    lm = ("--task", "lm", "--data", tmp_path / "text.txt", "--context", 16, "--dim", 16, "--heads", 2, "--layers", 2)
    flags = (*lm, *FLAGS, "--batch-size", 4, "--max-updates", 5, "--valid-every-updates", 2, "--sample-bytes", 0)
    whole = saved(train(tmp_path / "ddp", *flags, ranks=2))
    divided = saved(train(tmp_path / "fsdp", *flags, "--strategy", "fsdp", ranks=2))
    for entry in ("model", "plain"):
        for name, weight in whole[entry].items():
            torch.testing.assert_close(divided[entry][name], weight, rtol=0, atol=1e-6)
    back = ("--max-updates", 7, "--resume", tmp_path / "fsdp" / "checkpoints")
    from_divided = saved(train(tmp_path / "back", *flags, *back, ranks=2))
    from_whole = saved(train(tmp_path / "on", *flags, *back[:3], tmp_path / "ddp" / "checkpoints", ranks=2))
    for name, weight in from_whole["model"].items():
        torch.testing.assert_close(from_divided["model"][name], weight, rtol=0, atol=1e-6)


def test_an_optimizer_of_the_package_that_a_task_makes_itself_is_averaged_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from schedulefree import SGDScheduleFree\n"
        "from tiny_task import TinyTask\n"
        "class Own(TinyTask):\n"
        "    def optimizer(self, model):\n"
        "        return SGDScheduleFree(model.parameters(), lr=0.1)\n"
    )
    flags = ("--task", f"{tmp_path / 'own.py'}:Own", "--batch-size", 25, "--max-updates", 4)
    environ = {**ENVIRON, "PYTHONPATH": str(Path(TASK.rpartition(":")[0]).parent)}
    words = [sys.executable, "-m", "trainer", "--cpu", "--run-dir", str(tmp_path / "run"), *map(str, flags)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    state = saved(TrainingResult(tmp_path / "run", done))
    assert not torch.equal(state["model"]["0.weight"], state["plain"]["0.weight"])
    refused = subprocess.run([*words[:-1], "8", "--ema-decay", "0.9"], capture_output=True, text=True, env=environ)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "--ema-decay averages the weights, as SGDScheduleFree does itself" in refused.stderr
