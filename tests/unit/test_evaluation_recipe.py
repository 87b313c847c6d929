from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.lifecycle.evaluation_recipe import evaluation_recipe


@pytest.mark.parametrize(
    ("task", "asked", "split"),
    [
        ('task = "lm"\n[task]\ndata = "stdlib"', None, "valid"),
        ('task = "mnist"\n[task]\ndata = "d"', None, "test"),
        ('task = "lm"\n[task]\ndata = "stdlib"', "test", "test"),
    ],
)
def test_the_split_is_the_test_split_or_the_validation_of_a_task_without_one(
    tmp_path: Path, task: str, asked: str | None, split: str
) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f"[train]\nmax_epochs = 1\n{task}\n")
    overrides: list[str] = []
    recipe = evaluation_recipe(str(file), overrides=overrides, checkpoint=tmp_path / "best.pt", run="", split=asked)
    assert recipe.train.eval_split == split
