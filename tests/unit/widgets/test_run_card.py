from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import run_dirs
from row_texts import row_text

from gputrain_tui.console.widgets.root_cause import RootCause, draw_root_cause
from gputrain_tui.console.widgets.run_list import RunCard
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import write_status
from gputrain_tui.history.summary import summarize
from trainer.contract.record import Failure, Validation


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_dirs.run_dir(tmp_path, "demo", steps=2)


@pytest.mark.parametrize("split", ["test", "valid"])
def test_the_card_of_a_run_names_the_tested_weights(run: Run, split: Literal["test", "valid"]) -> None:
    found = Validation(time=1.0, step=360, epoch=3, split=split, loss=0.5, metrics={"accuracy": 0.9}, weights_step=340)
    write_status(run.dir, msgspec.structs.replace(run.status, tested=found))
    again = open_run(run.dir.path)
    assert again is not None
    entry = summarize(again, now=0.0)
    assert entry["tested"] == {"split": split, "weights_step": 340, "loss": 0.5, "metrics": {"accuracy": 0.9}}
    card = RunCard()
    card.entry = entry
    texts = [row_text(row).rstrip() for row in card.draw(100, 8)]
    assert f"{split:<9}(weights of step 340)  loss 0.5000  accuracy 0.9000" in texts


@pytest.mark.parametrize("width", [60, 198])
def test_the_message_of_a_run_is_whole(run: Run, width: int) -> None:
    message = "rank 3 on node001 failed in step 121: " + "the reason goes on " * 20
    write_status(run.dir, msgspec.structs.replace(run.status, status="failed", message=message.strip()))
    again = open_run(run.dir.path)
    assert again is not None
    card = RunCard()
    card.entry = summarize(again, now=0.0)
    texts = [row_text(row).strip() for row in card.draw(width, len(card.details(width)))]
    assert message.strip() in " ".join(texts)
    assert texts[-1].startswith("folder")
    cut = [row_text(row).strip() for row in card.draw(width, 3)]
    assert (cut[:2], cut[2]) == (texts[:2], "… ⏎ opens the run")


def test_a_best_validation_that_is_not_the_newest_has_a_line(run: Run) -> None:
    card = RunCard()
    best = {"value": 1.25, "step": 300, "metric": "loss", "maximize": False}
    card.entry = {**summarize(run, now=0.0), "valid": 1.5, "best_valid": best}
    assert any(row_text(row).strip() == "best     1.2500 at 300   newest  1.5000" for row in card.draw(80, 9))
    card.entry = {**card.entry, "valid": 1.25}
    assert not any(row_text(row).strip().startswith("best") for row in card.draw(80, 9))


@pytest.mark.parametrize(("words", "cut"), [(3, False), (200, True)])
def test_a_failure_that_does_not_fit_ends_with_an_ellipsis(words: int, cut: bool) -> None:
    failed = RootCause(failure=Failure(time=1.0, kind="exception", rank=1, message="too long " * words))
    rows = [row_text(row).strip() for row in draw_root_cause(failed, 60, 6)]
    assert [row.endswith("…") for row in rows[1:]] == ([False, True] if cut else [False])
