"""Rules between options: one refusal, in the words of a command line and in those of a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recipe_texts import recipe_of, refusal
from task_data import write_data

from gputrain_tui.lifecycle.prepared import endless_reason
from trainer.__main__ import main
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.option_rules import require_consistent, require_end, with_keys
from trainer.contract.options import Training
from trainer.contract.schema import to_flags
from trainer.engine.sharded_model import repeated_block
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task

Values = dict[str, Any]


def test_a_message_of_a_rank_names_the_keys_of_a_recipe_and_no_flag_of_another_program() -> None:
    message = "gives rank 1 no batch: a smaller --batch-size, or --max-tokens; pip install --user x, --lr-x"
    expected = "gives rank 1 no batch: a smaller train.batch_size, or train.max_tokens; pip install --user x, --lr-x"
    assert with_keys(message) == expected


CONTRADICTIONS: dict[str, Values] = {
    "--reset-optimizer needs --resume, the checkpoint": {"reset_optimizer": True},
    "--reset-dataloader needs --resume, the checkpoint": {"reset_dataloader": True},
    "--reset-meters needs --resume, the checkpoint": {"reset_meters": True},
    "--finetune-partial needs --finetune-from, the file": {"finetune_partial": True},
    "--checkpoint-run needs --resume or --eval-only, the folder": {"checkpoint_run": "20261124-a"},
    "--momentum is of --optimizer sgd, and that is adamw: leave one of them out": {"momentum": 0.9},
    "--adam-betas is of --optimizer adam, adamw, muon or schedulefree_adamw, and that is sgd: leave one": {
        "optimizer": "sgd",
        "adam_betas": (0.9, 0.98),
    },
    "--power is of --lr-scheduler polynomial_decay or wsd, and that is inverse_sqrt": {
        "lr_scheduler": "inverse_sqrt",
        "power": 2.0,
    },
    "--total-num-update is of --lr-scheduler polynomial_decay, cosine or wsd, and that is": {"total_num_update": 50},
    "--min-loss-scale is of --precision fp16, and that is bf16": {"precision": "bf16", "min_loss_scale": 1.0},
    "--decay-norms is false, but --weight-decay is 0: there is no decay": {"decay_norms": False},
    "--warmup-init-lr needs --warmup-updates, the optimizer steps of the warm-up": {"warmup_init_lr": 1e-5},
    "--curriculum is of shuffled data, and --shuffle is false: leave one": {"curriculum": 1, "shuffle": False},
    "--keep-last-epochs keeps checkpoints of --save-every-epochs, and that is 0": {
        "keep_last_epochs": 2,
        "save_every_epochs": 0,
    },
    "--nesterov needs a --momentum above 0": {"optimizer": "sgd", "nesterov": True},
    "--lr-scheduler is step, which needs --lr-step-updates, the optimizer steps between two": {"lr_scheduler": "step"},
    "--lr-scheduler is polynomial_decay, which needs --total-num-update, --max-updates or --max-epochs, the step": {
        "lr_scheduler": "polynomial_decay",
        "max_updates": 0,
        "stop_time": 1.0,
    },
    "--lr-scheduler is cosine, which needs --total-num-update, --max-updates or --max-epochs, the step at which": {
        "lr_scheduler": "cosine",
        "max_updates": 0,
        "stop_time": 1.0,
    },
    "--lr has 2 values, one per epoch, but --lr-scheduler inverse_sqrt computes all from one: give one, or --lr": {
        "lr": (0.1, 0.01),
        "lr_scheduler": "inverse_sqrt",
    },
    "--warmup-updates is 9, but --lr-scheduler cosine ends at --max-updates 9; the warm-up must be shorter": {
        "lr_scheduler": "cosine",
        "max_updates": 9,
        "warmup_updates": 9,
    },
    "--warmup-updates is 9, but --lr-scheduler cosine ends at --total-num-update 5; the warm-up must be": {
        "lr_scheduler": "cosine",
        "total_num_update": 5,
        "warmup_updates": 9,
    },
    "--ddp-comm-hook is of DDP, and --strategy fsdp has none: leave one of them out": {
        "strategy": "fsdp",
        "ddp_comm_hook": "powersgd",
    },
    "--find-unused-parameters is of DDP, and --strategy fsdp": {"strategy": "fsdp", "find_unused_parameters": True},
    "--static-graph is of DDP, and --strategy fsdp has none": {"strategy": "fsdp", "static_graph": True},
    "--broadcast-buffers is of DDP, and --strategy fsdp has none": {"strategy": "fsdp", "broadcast_buffers": True},
    "--bucket-cap-mb is of DDP, and --strategy fsdp has none": {"strategy": "fsdp", "bucket_cap_mb": 5.0},
    "--gradient-as-bucket-view is of DDP, and --strategy fsdp": {"strategy": "fsdp", "gradient_as_bucket_view": False},
    "--compile is not possible with --strategy fsdp: leave": {"strategy": "fsdp", "compile": "on"},
    "--optimizer muon needs whole matrices, which --strategy fsdp divides": {"strategy": "fsdp", "optimizer": "muon"},
    "--batch-size is balanced, which needs --global-batch-size, the samples of all ranks together": {
        "batch_size": "balanced",
    },
    "--global-batch-size is what --batch-size balanced divides among the ranks, and that is 16,48: make it": {
        "batch_size": (16, 48),
        "global_batch_size": 64,
    },
    "--global-batch-size is what --batch-size balanced divides among the ranks, and that is not given: make": {
        "global_batch_size": 64,
    },
    "--batch-size is balanced, so the ranks' shares change, but --fix-batches-to-gpus gives each rank the same": {
        "batch_size": "balanced",
        "global_batch_size": 64,
        "fix_batches_to_gpus": True,
    },
    "--drop-last leaves out what does not fill the batch of every rank, but with --batch-size balanced and": {
        "batch_size": "balanced",
        "global_batch_size": 64,
        "max_tokens": 8,
        "drop_last": True,
    },
    "--shares-from repeats the shares of --batch-size balanced: give that, or leave it out": {"shares_from": "run"},
    "--ema-decay averages the weights, as --optimizer schedulefree_adamw does itself": {
        "optimizer": "schedulefree_adamw",
        "ema_decay": 0.9,
    },
    "--adam-betas begins with 0, by which --optimizer schedulefree_adamw divides": {
        "optimizer": "schedulefree_adamw",
        "adam_betas": (0.0, 0.9),
    },
    "--ema-start needs --ema-decay, the decay of the average that begins there": {"ema_start": 5},
    "--lr-scheduler is wsd, which needs --decay-updates, the optimizer steps of its decay": {"lr_scheduler": "wsd"},
    "--decay-updates is of --lr-scheduler wsd, and that is fixed: leave one of them out": {"decay_updates": 3},
    "--decay-updates is 5, but --lr-scheduler wsd ends at --max-updates 9, and its warm-up takes 6 of these": {
        "lr_scheduler": "wsd",
        "max_updates": 9,
        "warmup_updates": 6,
        "decay_updates": 5,
    },
    "--required-batch-size-multiple cuts the batches of --max-tokens: give that too": {
        "required_batch_size_multiple": 2
    },
    "--batch-size has 2 values, but --max-tokens makes batches that any rank may get: give one": {
        "max_tokens": 8,
        "batch_size": (4, 2),
    },
    "--eval-only does not train, and --resume does: leave one of them out": {"eval_only": "a.pt", "resume": "b.pt"},
    "--max-tokens needs the tokens of each sample, which mnist does not give": {"task": "mnist", "max_tokens": 8},
    "--activation-checkpointing needs modules whose activations may be computed again, and mnist names none": {
        "task": "mnist",
        "activation_checkpointing": True,
    },
    "--strategy fsdp divides a model by its repeated block, and that of mnist has none: take ddp": {
        "task": "mnist",
        "strategy": "fsdp",
    },
    "--eval-split is test, but the task has no such split; it has valid": {"eval_only": "a.pt", "eval_split": "test"},
}

ENDLESS: dict[str, Values] = {
    "--max-updates is 0, and nothing would end this training: set --max-epochs, --max-updates or --stop-time, or": {},
    "--patience is 3, but nothing is validated, as --valid-every-epochs and --valid-every-updates are 0, and nothing": {
        "patience": 3,
        "valid_every_epochs": 0,
    },
    "--patience is 3, but nothing is validated, as the task has no validation data, and nothing would end this": {
        "patience": 3,
        "task": "mnist",
    },
    "--patience is 3, but nothing is validated, as the task has no validation data: leave it out": {
        "patience": 3,
        "max_updates": 5,
        "task": "mnist",
    },
    "--min-lr is 0, but the learning rate stays above it, and nothing would end this training": {"min_lr": 0.0},
    "--min-lr is 0.01, but the learning rate stays above it": {"min_lr": 0.01, "lr": (0.1, 0.05)},
    "--min-lr is 1e-05, but the learning rate stays above it": {
        "min_lr": 1e-5,
        "lr_scheduler": "polynomial_decay",
        "total_num_update": 10,
        "end_learning_rate": 1e-4,
    },
    "--min-lr is 0, but the learning rate stays above it, and nothing": {"min_lr": 0.0, "lr_scheduler": "inverse_sqrt"},
    "--min-lr is 1e-06, but the learning rate stays above it, and nothing": {
        "min_lr": 1e-6,
        "lr_scheduler": "step",
        "lr_step_updates": 5,
        "lr_step_gamma": 1.0,
    },
    "--min-lr is 0.5, but the learning rate begins at 0.001, so nothing would be trained: lower it, or raise --lr": {
        "min_lr": 0.5,
        "max_updates": 5,
    },
    "--min-lr is 0.0002, but the learning rate begins at 0.0001, so nothing": {
        "min_lr": 2e-4,
        "max_updates": 5,
        "warmup_updates": 10,
    },
}

ENDING: list[Values] = [
    {"max_epochs": 1},
    {"max_updates": 1},
    {"stop_time": 0.5},
    {"patience": 1},
    {"patience": 1, "valid_every_epochs": 0, "valid_every_updates": 5},
    {"min_lr": 1e-5, "lr": (1e-3, 1e-5)},
    {"min_lr": 1e-5, "lr_scheduler": "inverse_sqrt"},
    {"min_lr": 0.0, "lr_scheduler": "step", "lr_step_updates": 5},
    {"min_lr": 0.0, "lr_scheduler": "cosine", "total_num_update": 9},
    {"min_lr": 1e-4, "lr_scheduler": "polynomial_decay", "total_num_update": 9, "end_learning_rate": 1e-4},
    {"min_lr": 1e-4, "warmup_updates": 100, "resume": "a.pt", "max_updates": 5},
    {"eval_only": "a.pt"},
    {"eval_only": "a.pt", "eval_split": "valid"},
]

TASK_TABLES = {
    "lm": {"data": "stdlib"},
    "mnist": {"data": "images", "valid_subset": "none"},
}
WORKING = {"task": "lm", "max_updates": 5}


def training(values: Values) -> tuple[Training, Any]:
    options = Training(**{"task": "lm", **values})  # type: ignore[arg-type]
    schema = options_schema(options.task)
    assert schema is not None
    return options, schema(**TASK_TABLES[options.task])


def recipe_text(values: Values) -> str:
    train = {"task": "lm", **values}
    tables = {"cluster": {"nodes": [{"cpu_ranks": 2}]}, "train": train, "task": TASK_TABLES[train["task"]]}
    return msgspec.json.encode(tables).decode()


def in_recipe(line: str) -> str:
    """Return the words of a command line in those of a recipe."""
    return " ".join(
        f"train.{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in line.split(" ")
    )


def on_the_command_line(values: Values, capsys: pytest.CaptureFixture[str]) -> str:
    options, task_options = training(values)
    assert main([*to_flags(options), *to_flags(task_options), "--cpu"], {}) == ExitCode.BAD_REQUEST
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_command_line_recipe_and_rank_in_their_own_words(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = WORKING | CONTRADICTIONS[line]
    options, task_options = training(values)
    with pytest.raises(RequestError) as refused:  # as Loop and evaluate_checkpoint do
        require_consistent(options, task_options)
    assert str(refused.value).startswith(line)
    assert on_the_command_line(values, capsys).startswith(f"trainer: {line}")
    assert in_recipe(line) in refusal(recipe_text(values))


@pytest.mark.parametrize("line", ENDLESS)
def test_a_training_without_a_step_or_an_end_is_refused_by_command_line_check_and_rank(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ENDLESS[line]
    options, task_options = training(values)
    with pytest.raises(RequestError) as refused:
        require_end(options, task_options)
    assert str(refused.value).startswith(line)
    assert on_the_command_line(values, capsys).startswith(f"trainer: {line}")
    assert in_recipe(line) in endless_reason(recipe_of(recipe_text(values)))


@pytest.mark.parametrize("values", ENDING, ids=str)
def test_a_training_with_a_limit_that_is_reached_is_accepted(values: Values) -> None:
    options, task_options = training(values)
    require_consistent(options, task_options)
    require_end(options, task_options)
    assert endless_reason(recipe_of(recipe_text(values))) == ""


def test_a_batch_size_per_rank_is_compared_with_the_ranks_before_they_start(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--task", "lm", "--data", "stdlib", "--max-updates", "1", "--batch-size", "1,2,3"]
    assert main([*options, "--cpu", "--distributed-world-size", "2"], {}) == ExitCode.BAD_REQUEST
    assert "--batch-size has 3 values, but there are 2 ranks; give one, or one per rank" in capsys.readouterr().err


def test_an_optimizer_whose_package_is_not_installed_is_refused_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    words = ["--task", "lm", "--data", "stdlib", "--max-updates", "1", "--cpu", "--optimizer", "schedulefree_adamw"]
    assert main(words, {}) == ExitCode.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("optimizer schedulefree_adamw needs the package schedulefree: pip install schedulefree")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {}) for name in BUILT_IN),
        ("lm", {"valid_fraction": 0.0}),
        ("masked_lm", {"valid_fraction": 0.0}),
        ("docnn", {"eval_path": None}),
        ("mnist", {"valid_subset": "none"}),
    ],
)
def test_what_the_options_say_of_a_built_in_task_is_true_of_it(name: str, changed: Values, tmp_path: Path) -> None:
    schema, task = options_schema(name), load_task(name)
    assert schema is not None
    options = schema(**{**write_data(tmp_path, name), **changed})
    built = task(options)
    assert set(options.splits) == set(built.datasets())
    assert options.has_repeated_block == bool(repeated_block(built.model()))
    assert options.has_sizes == (task.sizes is not Task.sizes)
    assert options.has_checkpointed_modules == (task.checkpointed_modules is not Task.checkpointed_modules)
