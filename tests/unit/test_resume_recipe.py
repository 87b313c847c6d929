"""The recipe of a run that continues another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_run
from run_dirs import run_dir

from gputrain_tui import cli
from gputrain_tui.lifecycle import recipe_to_run
from gputrain_tui.paths import runs_folder
from gputrain_tui.recipe.build import load
from trainer.contract.errors import RequestError


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


@pytest.mark.parametrize(
    ("task", "started_in", "here", "told"),
    [
        ("mytask.py:Spiral", "project", "elsewhere", "which has it: enter that folder first"),
        ("mytask:Spiral", "project", "elsewhere", "which has it: enter that folder first"),
        ("mytask.py:Spiral", "gone", "elsewhere", "which has no mytask.py any more"),
        ("mytask.py:Spiral", "project", "project", None),
        ("mytask.py:Spiral", "gone", "project", None),
        ("mytask.py:Spiral", "", "elsewhere", None),
        ("/x/mytask.py:Spiral", "project", "elsewhere", None),
        ("lm", "project", "elsewhere", None),
    ],
)
def test_the_folder_with_the_file_of_a_run_s_task_is_named_from_another_one(
    tmp_path: Path, task: str, started_in: str, here: str, told: str | None
) -> None:
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "mytask.py").touch()
    folder = str(tmp_path / started_in) if started_in else ""
    run = make_run(tmp_path / "runs", status="stopped", workdir=folder)
    run.dir.recipe.write_text(f'[train]\ntask = "{task}"\n')
    hint = recipe_to_run.folder_hint(run, here=tmp_path / here)
    assert hint == ("" if told is None else f"{run.id} was started in {folder}, {told}")


def test_the_error_of_a_recipe_that_is_continued_elsewhere_is_one_line_with_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    (tmp_path / "mytask.py").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = make_run(runs_folder(), status="stopped", workdir=str(tmp_path))
    run.dir.recipe.write_text('[train]\ntask = "mytask.py:Spiral"\n')
    (run.dir.checkpoints / "step_00000050.pt").touch()
    with pytest.raises(RequestError) as refused:
        recipe_to_run.load(None, overrides=["train.lr=0.1"], resume=run.id)
    told = (
        f"task file mytask.py does not exist; {run.id} was started in {tmp_path}, which has it: enter that folder first"
    )
    assert str(refused.value).endswith(told)
    assert "\n" not in str(refused.value)


def test_last_is_the_last_training_where_a_training_is_continued_or_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    trained = run_dir(runs_folder(), "trained", status="stopped", started=1_790_000_000.0)
    (trained.dir.checkpoints / "step_00000050.pt").touch()
    evaluation = run_dir(runs_folder(), "eval-trained", status="finished", started=1_790_000_100.0)
    text = evaluation.dir.recipe.read_text().replace('task = "lm"', 'task = "lm"\neval_only = "/c/best.pt"')
    evaluation.dir.recipe.write_text(text)
    recipe = recipe_to_run.load(None, overrides=[], resume="last")
    assert recipe.train.resume == str(trained.dir.checkpoints)
    assert recipe.notes[-1] == f"--resume last: {trained.id}, the last run that trained"
    with pytest.raises(RequestError) as refused:
        recipe_to_run.load(None, overrides=[], resume=evaluation.id)
    told = f"{evaluation.id} is an evaluation of /c/best.pt; name the run that trained it"
    assert str(refused.value) == f"--resume {evaluation.id}: {told}"
    assert cli.main(["compare", "last", "last"]) == 0
    assert capsys.readouterr().out.startswith(f"{trained.id} against {trained.id}\n")


@pytest.mark.parametrize(
    ("data", "key", "started_in", "told"),
    [
        ("texts", "task.data", "project", True),
        ("texts", "task.pattern", "project", False),
        ("texts", "train.data", "project", False),
        ("texts", "task.data", "elsewhere", False),
        ("texts", "task.data", "", False),
        ("/texts", "task.data", "project", False),
        ("x" * 5000, "task.data", "project", False),
    ],
)
def test_missing_data_of_a_run_that_its_own_folder_has_is_named_with_that_folder(
    tmp_path: Path, data: str, key: str, started_in: str, told: bool
) -> None:
    (tmp_path / "project" / "texts").mkdir(parents=True)
    folder = str(tmp_path / started_in) if started_in else ""
    run = make_run(tmp_path / "runs", status="stopped", workdir=folder)
    run.dir.recipe.write_text(f'[train]\ntask = "lm"\n[task]\ndata = "{data}"\n')
    hint = f"{run.id} was started in {folder}, which has it: enter that folder first"
    recipe = load(str(run.dir.recipe))
    assert recipe_to_run.data_hint(recipe, key) == (hint if told else "")
    assert recipe_to_run.data_hint(replace(recipe, origin=replace(recipe.origin, name="r.toml")), key) == ""
