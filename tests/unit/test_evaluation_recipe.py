from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from gputrain_tui.lifecycle.recipe_to_run import evaluation_recipe
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import evaluated_split


@pytest.mark.parametrize(
    ("task", "asked", "split"),
    [
        ('task = "lm"\n[task]\ndata = "stdlib"', None, "valid"),
        ('task = "mnist"\n[task]\ndata = "d"', None, "test"),
        ('task = "lm"\n[task]\ndata = "stdlib"', "valid", "valid"),
    ],
)
def test_the_split_is_the_test_split_or_the_validation_of_a_task_without_one(
    tmp_path: Path, task: str, asked: Literal["test", "valid"] | None, split: str
) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f"[train]\nmax_epochs = 1\n{task}\n")
    overrides: list[str] = []
    recipe = evaluation_recipe(str(file), overrides=overrides, checkpoint=tmp_path / "best.pt", run="", split=asked)
    schema = options_schema(recipe.train.task)
    assert schema is not None
    assert evaluated_split(recipe.train, msgspec.convert(dict(recipe.task_options), schema).splits) == split


@pytest.mark.parametrize(
    ("task", "asked", "message"),
    [
        ('"lm"\n[task]\ndata = "d"', "test", "--split is test, but the task has no such split; it has valid"),
        ('"lm"\n[task]\ndata = "d"\nvalid_fraction = 0.0', None, "no such split; it has none besides train"),
        ('"mnist"\n[task]\ndata = "d"\nvalid_subset = "none"', "valid", "--split is valid, but .* it has test"),
        ('"docnn"\n[task]\ntrain_path = "t"', "test", "it has none besides train"),
    ],
)
def test_a_split_that_a_built_in_task_lacks_is_refused_before_a_rank_starts(
    tmp_path: Path, task: str, asked: Literal["test", "valid"] | None, message: str
) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f"[train]\nmax_epochs = 1\ntask = {task}\n")
    with pytest.raises(RequestError, match=message):
        evaluation_recipe(str(file), overrides=[], checkpoint=tmp_path / "best.pt", run="", split=asked)
