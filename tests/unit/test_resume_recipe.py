"""The recipe of a run that continues another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_dirs import run_dir

from gputrain_tui.lifecycle import recipe_to_run
from gputrain_tui.paths import runs_folder


@pytest.mark.parametrize(("overrides", "reset"), [([], False), (["train.reset_optimizer=true"], True)])
def test_resets_of_a_run_are_not_repeated_when_it_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], reset: bool
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = run_dir(runs_folder(), "begun", status="stopped")
    text = run.dir.recipe.read_text().replace('task = "lm"', 'task = "lm"\nresume = "old.pt"\nreset_optimizer = true')
    run.dir.recipe.write_text(text)
    (run.dir.checkpoints / "step_00000050.pt").touch()
    recipe = recipe_to_run.load(None, overrides=overrides, resume=run.id)
    assert (recipe.train.resume, recipe.train.reset_optimizer) == (str(run.dir.checkpoints), reset)
