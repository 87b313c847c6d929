"""A validation or a test that is NaN or infinite: shown, found, and never a reason to end in success."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_reading import events_of
from text_cache import with_task_options
from trained import ENVIRON
from waiting import LIMIT_S

from gputrain_tui.headless.progress import event_line
from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.summary import summarize
from trainer.contract.record import Finding, Validation, decode_events
from trainer.contract.record.json_lines import encode_event

TASK = f"{Path(__file__).parents[1] / 'support/numeric_tasks.py'}:NanValidation"
RECIPE = """\
name = "validations"
[[cluster.nodes]]
cpu_ranks = 1
[train]
task = "{task}"
batch_size = 24
lr = 0.01
threads = 1
{train}
[task]
{options}
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**ENVIRON, "GPUTRAIN_HOME": str(with_task_options(folder / "home"))}
    command = [sys.executable, "-m", "gputrain_tui", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )


def train(folder: Path, train_lines: str, options: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(task=TASK, train=train_lines, options=options))
    done = run(folder, "run", str(recipe))
    found = list_runs(folder / "home" / "runs")
    return done, events_of(found[0].dir.rank_events(0)) if found else []


def findings(events: list[Any]) -> list[tuple[str, int]]:
    kinds = [each for each in events if isinstance(each, Finding) and each.kind == "non_finite_validation"]
    return [(each.state, each.step or 0) for each in kinds]


@pytest.mark.parametrize(
    ("metric", "infinite"), [pytest.param("false", "false", marks=pytest.mark.slow), ("true", "true")]
)
def test_it_is_shown_is_a_finding_and_does_not_use_up_patience(tmp_path: Path, metric: str, infinite: str) -> None:
    best = '"accuracy"' if metric == "true" else '"loss"'
    done, events = train(
        tmp_path,
        f"max_epochs = 6\npatience = 2\ntest = false\nbest_metric = {best}",
        f"metric = {metric}\ninfinite = {infinite}\nbegin = 2",
    )
    assert done.returncode == 0, done.stderr
    validations = [each for each in events if isinstance(each, Validation)]
    assert [each.step for each in validations] == [1, 2, 3, 4, 5, 6]
    bad = [each.metrics["accuracy"] if metric == "true" else each.loss for each in validations]
    assert [math.isnan(each) for each in bad] == [False, True, True, True, True, True]
    assert findings(events) == [("raised", 2)]
    assert "critical: no validation has had finite results since step 2" in done.stderr
    assert "valid epoch 3  step 3" in done.stderr
    assert ("accuracy nan" if metric == "true" else "loss nan") in done.stderr
    entry = summarize(list_runs(tmp_path / "home" / "runs")[0], now=0.0)
    assert math.isnan(entry["valid"]) == (metric == "false")
    listed = json.loads(run(tmp_path, "runs", "--json").stdout)
    assert (listed[0]["valid"] is None) == (metric == "false")
    if metric == "false":
        assert "nan" in run(tmp_path, "runs").stdout


def test_a_finite_validation_clears_the_finding(tmp_path: Path) -> None:
    done, events = train(
        tmp_path, "max_epochs = 9\npatience = 2\ntest = false\nlr_scheduler = 'fixed'", "begin = 2\nend = 3"
    )
    assert done.returncode == 0, done.stderr
    assert findings(events) == [("raised", 2), ("cleared", 4)]


def test_a_training_that_only_patience_ends_fails_once_its_validations_are_nan(tmp_path: Path) -> None:
    done, events = train(tmp_path, "max_epochs = 0\npatience = 3\ntest = false", "begin = 2")
    assert done.returncode == 1
    assert "the loss of the last 3 validations is NaN or infinite" in done.stderr
    assert [each.step for each in events if isinstance(each, Validation)] == [1, 2, 3, 4]


@pytest.mark.parametrize("metric", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_test_that_is_nan_ends_with_1_and_is_recorded(tmp_path: Path, metric: str) -> None:
    done, events = train(tmp_path, "max_epochs = 2", f"split = 'test'\nmetric = {metric}")
    assert done.returncode == 1
    name = "accuracy" if metric == "true" else "loss"
    assert f"trained, but the test is not finite: {name} nan" in done.stderr
    (tested,) = [each for each in events if isinstance(each, Validation) and each.split == "test"]
    assert math.isnan(tested.metrics["accuracy"] if metric == "true" else tested.loss)
    last = run(tmp_path, "eval", "last")
    assert last.returncode == 1
    assert f"{name} nan" in last.stderr


def test_a_result_that_is_no_number_is_null_in_the_record_and_nan_to_readers() -> None:
    event = Validation(time=1.0, step=3, epoch=1, split="valid", loss=math.inf, metrics={"accuracy": 1e200, "f1": 0.5})
    line = encode_event(event)
    assert json.loads(line)["loss"] is None
    (read,) = decode_events(line)
    assert isinstance(read, Validation)
    assert (math.isnan(read.loss), math.isnan(read.metrics["accuracy"]), read.metrics["f1"]) == (True, True, 0.5)
    assert "loss nan" in "".join(text for text, _ in event_line(read) or [])
