"""``--strategy fsdp``: the numbers of a model that is divided among the ranks are those of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_on_ranks import train_on
from rank_group import FSDP_ON_CPU, Gang

TASK = "block_tasks:BlockTask"
EXACT = 1e-12


@pytest.fixture(scope="module")
def two() -> Iterator[Gang]:
    if not FSDP_ON_CPU:
        pytest.skip("FSDP2 of this torch needs a GPU")
    members = Gang(2)
    yield members
    members.close()


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def gang(request: pytest.FixtureRequest, two: Gang) -> Iterator[Gang]:
    members = two if request.param == 2 else Gang(request.param)
    yield members
    if members is not two:
        members.close()


def trained(gang: Gang, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train on all ranks, with uneven last batches; return rank 0's result."""
    given = {"max_epochs": 4, "batch_size": (3,), "lr": (0.02,), "valid_every_epochs": 1, **options}
    results = gang.run(train_on, TASK, None if folder is None else str(folder), given)
    for result in results:
        assert result["error"] == results[0]["error"]
    return results[0]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["model"].keys() == other["model"].keys()
    assert one["updates"] == other["updates"] >= 20
    return max(float((one["model"][name] - other["model"][name]).abs().max()) for name in one["model"])


NUMBERS: dict[str, dict[str, Any]] = {
    "accumulated and clipped": {"update_freq": (2,), "clip_norm": 0.5, "max_epochs": 9},
    "counts of the loss": {"task_options": {"per_sample": 0}, "clip_norm": 5.0},
    "averaged weights": {"ema_decay": 0.9, "optimizer": "sgd", "momentum": 0.9, "lr": (0.002,)},
    "uneven batches": {"batch_size": "uneven", "optimizer": "adam", "weight_decay": 0.1},
    "recomputed": {"optimizer": "adagrad"},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_in_double_precision_weights_and_best_validation_are_those_of_ddp(gang: Gang, name: str) -> None:
    options = dict(NUMBERS[name])
    if options.get("batch_size") == "uneven":
        options["batch_size"] = (1, 3) if len(gang._members) == 2 else (1, 3, 2)
    sharded, ddp = (trained(gang, strategy=strategy, **options) for strategy in ("fsdp", "ddp"))
    assert sharded["error"] == ddp["error"] == ""
    assert difference(sharded, ddp) < EXACT
    assert sharded["best"][0] == pytest.approx(ddp["best"][0], abs=EXACT)
    assert sharded["batches"] == ddp["batches"]


def test_in_single_precision_weights_are_those_of_ddp_to_a_millionth(two: Gang) -> None:
    options = {"max_epochs": 5, "update_freq": (2,), "task_options": {"double": False}}
    sharded, ddp = (trained(two, strategy=strategy, **options) for strategy in ("fsdp", "ddp"))
    assert sharded["error"] == ddp["error"] == ""
    assert difference(sharded, ddp) < 1e-6


RESUMED = [("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp")]


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_checkpoint_is_continued_by_both_strategies(two: Gang, tmp_path: Path, before: str, after: str) -> None:
    options = {"max_epochs": 4, "ema_decay": 0.9}
    through = trained(two, strategy="ddp", **options)
    first = trained(two, tmp_path / "a", strategy=before, **{**options, "max_epochs": 2})
    rest = trained(two, tmp_path / "b", strategy=after, resume=str(tmp_path / "a"), **options)
    assert first["error"] == rest["error"] == ""
    assert difference(rest, through) < EXACT


def test_both_strategies_begin_with_the_weights_of_a_file(two: Gang, tmp_path: Path) -> None:
    assert trained(two, tmp_path / "a", strategy="fsdp", max_epochs=2)["error"] == ""
    begun = {"finetune_from": str(max((tmp_path / "a").glob("step_*"))), "max_epochs": 5}
    sharded, ddp, fresh = (
        trained(two, strategy=strategy, **given)
        for strategy, given in (("fsdp", begun), ("ddp", begun), ("ddp", {"max_epochs": 5}))
    )
    assert sharded["error"] == ddp["error"] == fresh["error"] == ""
    assert difference(sharded, ddp) < EXACT < difference(ddp, fresh)


@pytest.mark.skipif(FSDP_ON_CPU, reason="this torch divides models on CPU ranks")
def test_a_torch_that_divides_models_on_gpus_only_is_refused_with_what_works() -> None:
    members = Gang(2)
    error = trained(members, strategy="fsdp")["error"]
    members.close()
    assert error.endswith("which has it on GPUs only; --strategy ddp works")


@pytest.mark.parametrize("other", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_other_ranks_continue_what_some_began(two: Gang, tmp_path: Path, other: int) -> None:
    more = Gang(other)
    before, after = (more, two) if other == 3 else (two, more)
    trained(before, tmp_path, strategy="fsdp", max_updates=5, max_epochs=9)
    epochs = 4 if after is two else 8
    rest = [trained(after, None, strategy=way, resume=str(tmp_path), max_epochs=epochs) for way in ("fsdp", "ddp")]
    more.close()
    assert rest[0]["error"] == rest[1]["error"] == ""
    assert difference(*rest) < EXACT
    assert rest[0]["batches"] == rest[1]["batches"]


def test_a_checkpoint_is_the_one_that_ddp_writes(two: Gang, tmp_path: Path) -> None:
    from trainer.checkpoint import kinds, load

    states = []
    for strategy in ("fsdp", "ddp"):
        folder = tmp_path / strategy
        assert trained(two, folder, strategy=strategy, ema_decay=0.5)["error"] == ""
        # Which older one is left, too, depends on the disk: a save supersedes one whose writing has not begun.
        newest = max(folder.glob("step_*"))
        states.append((newest.name, (folder / "best.pt").exists(), load(newest)))
    (*files, sharded), (*expected, ddp) = states
    assert files == expected == ["step_00000028.pt", True]
    assert kinds(sharded) == kinds(ddp)
    for name, weight in ddp["model"].items():
        torch.testing.assert_close(sharded["model"][name], weight, rtol=0, atol=EXACT)
    assert sharded["model"]["last.weight"].data_ptr() == sharded["model"]["tied.weight"].data_ptr()


REFUSED = {
    "returned blocks, a ModuleList, which is never called": {"fault": "list"},
    "shard_modules() returned at 0 a Linear that is no module of the model": {"fault": "foreign"},
    "shard_modules() returned a int, but must return a list of modules": {"fault": "number"},
    "scale is a single number and cannot be divided": {"fault": "scalar"},
    "are of one block and differ in dtype": {"fault": "mixed", "double": False},
    "blocks.0.outer.weight is shared between a block and a module outside of it": {"fault": "shared"},
    "words.weight has sparse gradients": {"fault": "sparse"},
    "does not use blocks.2.spare.weight, blocks.2.spare.bias, whose gradient the ranks wait for: freeze it": {
        "fault": "unused"
    },
    "non-finite loss at step 1: a batch of a model that is divided among the ranks is not computed again": {
        "bad_from": 0
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name_on_all_ranks(two: Gang, message: str) -> None:
    error = trained(two, strategy="fsdp", task_options=REFUSED[message])["error"]
    assert message in error
    assert "\n" not in error


def test_a_model_without_a_repeated_block_and_a_single_rank_are_refused(two: Gang) -> None:
    results = two.run(train_on, "block_tasks:OneBlock", None, {"strategy": "fsdp", "batch_size": (3,)})
    assert all(
        "that of RecordingTask has none: give the task shard_modules(model)" in each["error"] for each in results
    )
    alone = train_on(0, 1, TASK, None, {"strategy": "fsdp", "batch_size": (3,)})
    assert "--strategy is fsdp, which divides a model among several ranks, and there is 1 rank" in alone["error"]
