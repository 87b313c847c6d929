"""What ranks refuse of the options alone is refused by `check`, by key: random options on ranks and in a recipe."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trained
from loop_on_ranks import train_on
from rank_group import Gang
from sized_task import DeepTask, SizedTask
from worker_contexts import worker_context

from gputrain_tui.lifecycle.prepared import endless_reason, plan_recipe
from gputrain_tui.recipe.build import build
from trainer.__main__ import main
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.options import Training
from trainer.contract.schema import describe, to_flags
from trainer.engine.checkpoint_evaluation import evaluate_checkpoint
from trainer.engine.starting_point import open_start

SEED = 27
MAX_BATCHES = 3000
"""Batches after which a training counts as endless; those that end make a few hundred."""
TASK = "test_one_verdict:AnyTask"

VALUES: dict[str, list[Any]] = {
    "batch_size": [(4,), (25,), (4, 8), (4, 8, 4)],
    "max_tokens": [24, 40],
    "required_batch_size_multiple": [1, 2],
    "valid_batch_size": [3],
    "curriculum": [1],
    "fix_batches_to_gpus": [True],
    "drop_last": [True],
    "max_epochs": [0, 2],
    "max_updates": [0, 5],
    "min_lr": [0.0, 0.01, 0.05, 0.5],
    "patience": [1, 2],
    "optimizer": ["sgd", "adam", "adadelta", "adagrad"],
    "lr": [(0.1,), (0.1, 0.05), (0.01,)],
    "momentum": [0.9],
    "nesterov": [True],
    "clip_norm": [0.5],
    "update_freq": [(2,), (1, 3)],
    "lr_scheduler": ["fixed", "polynomial_decay", "inverse_sqrt", "cosine", "step"],
    "warmup_updates": [2, 6],
    "warmup_init_lr": [0.001],
    "total_num_update": [4, 30],
    "end_learning_rate": [0.005, 0.02],
    "lr_step_updates": [2],
    "lr_step_gamma": [0.5, 1.0],
    "valid_every_updates": [3],
    "valid_every_epochs": [0, 2],
    "eval_only": ["left.pt"],
    "eval_split": ["valid"],
    "precision": ["bf16", "fp16"],
    "ema_decay": [0.9],
    "activation_checkpointing": [True],
    "find_unused_parameters": [True],
    "gradient_as_bucket_view": [False],
    "static_graph": [True],
    "broadcast_buffers": [True],
    "ddp_comm_hook": ["fp16", "bf16"],
    "bucket_cap_mb": [0.001],
    "keep_last_epochs": [1],
    "save": [False],
    "resume": ["left.pt"],
    "reset_optimizer": [True],
    "reset_dataloader": [True],
    "reset_meters": [True],
    "finetune_from": ["left.pt"],
    "finetune_partial": [True],
}
"""Values of the options that may contradict each other, or limit a training. Not drawn are those that need something of
the machine (compile, deterministic, count_flops), of the clock (stop_time) or of the task (best_metric)."""


class AnyTask(SizedTask, DeepTask):
    """Task that has all that an option may need, and that ends a training which would never end."""

    def datasets(self) -> Any:
        splits = super().datasets()
        return {**splits, "test": splits["valid"]}

    def loss(self, model: Any, batch: Any) -> Any:
        if self.calls > MAX_BATCHES:
            raise TimeoutError("this training does not end")
        return super().loss(model, batch)


class UnvalidatedTask(SizedTask):
    def datasets(self) -> Any:
        return {"train": super().datasets()["train"]}


def drawn_options(checkpoint: str, cases: int) -> Iterator[dict[str, Any]]:
    """Yield options at random, mostly with a limit."""
    draw = random.Random(SEED)
    for _ in range(cases):
        names = draw.sample(sorted(VALUES), draw.randint(1, 6))
        options = {name: draw.choice(VALUES[name]) for name in names}
        if draw.random() < 0.7:
            options.setdefault("max_updates", 5)
        if "resume" in options:
            options.pop("optimizer", None)  # that of another kind does not fit the checkpoint
        yield {name: checkpoint if value == "left.pt" else value for name, value in options.items()}


def tried(rank: int, world_size: int, options: dict[str, Any]) -> str:
    """Train or evaluate as a rank does; return its refusal or failure, else an empty string."""
    if not options.get("eval_only"):
        try:
            result = train_on(rank, world_size, TASK, None, {"max_epochs": 0, "batch_size": (4,), **options})
        except Exception as error:  # noqa: BLE001 - any end but a good one is compared
            return f"{type(error).__name__}: {error}"
        return str(result["error"]) or ("" if result["updates"] else "no step was made")
    try:
        training = Training(**{"task": TASK, "batch_size": (4,), **options})
        evaluate_checkpoint(
            AnyTask(AnyTask.Options()), training, worker_context(rank, world_size), open_start(training)
        )
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def refused_by_recipe(options: dict[str, Any]) -> str:
    """Return what ``gputrain check`` says to these options; empty if nothing."""
    train = {"task": trained.TASK, "batch_size": 4, **options}
    text = msgspec.json.encode({"cluster": {"nodes": [{"cpu_ranks": 2}]}, "train": train}).decode()
    try:
        recipe = build(text, name="r.json")
        if endless := endless_reason(recipe):
            return endless
        plan_recipe(recipe)  # it knows the number of ranks
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cases", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_options_that_ranks_refuse_are_refused_by_check_and_command_line_by_key(
    two_ranks: Gang, tmp_path: Path, capsys: pytest.CaptureFixture[str], cases: int
) -> None:
    begun = {"batch_size": (4,), "max_epochs": 0, "max_updates": 2}
    (first, _) = two_ranks.run(train_on, TASK, str(tmp_path / "left"), begun)
    assert first["error"] == ""
    (checkpoint,) = (tmp_path / "left").glob("step_*.pt")
    known = {option.name for option in describe(Training)}
    verdicts = {"refused": 0, "trained": 0}
    for options in drawn_options(str(checkpoint), cases):
        by_ranks = two_ranks.run(tried, options)
        by_recipe = refused_by_recipe(options)
        assert bool(by_recipe) == any(by_ranks), (options, by_ranks, by_recipe)
        verdicts["refused" if by_recipe else "trained"] += 1
        if not by_recipe:
            continue
        key = re.search(r"train\.(\w+) ", by_recipe)
        assert key is not None
        assert key[1] in known
        words = to_flags(Training(**{"task": trained.TASK, "batch_size": (4,), **options}))
        assert main([*words, "--cpu", "--distributed-world-size", "2"], {}) == ExitCode.BAD_REQUEST, options
        assert f"--{key[1].replace('_', '-')} " in capsys.readouterr().err
    assert min(verdicts.values()) > cases / 5, verdicts


def test_patience_alone_is_refused_by_ranks_whose_task_has_no_validation_data(two_ranks: Gang) -> None:
    options = {"max_epochs": 0, "batch_size": (4,), "patience": 1}
    for rank in two_ranks.run(train_on, "test_one_verdict:UnvalidatedTask", None, options):
        assert rank["error"] == (
            "--patience is 1, but nothing is validated, as the task has no validation data, and nothing would end this "
            "training: set --max-epochs, --max-updates or --stop-time in its place"
        )
