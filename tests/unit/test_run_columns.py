from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from gputrain_tui.commands.runs import report
from gputrain_tui.history.run_columns import cause, run_filter, sorted_runs
from gputrain_tui.history.summary import SUMMARY_KEYS, UNREADABLE, summarize
from gputrain_tui.tables import width
from trainer.contract.errors import RequestError


def entry(name: str, **values: Any) -> dict[str, Any]:
    base = {"id": name, "state": "finished", "recipe": "lm", "world_size": 2, "tags": [], "started": 0.0}
    return dict.fromkeys(SUMMARY_KEYS) | base | values


RUNS = [
    entry("c", loss=3.0, step=10, tags=["baseline"], note="Good one", started=3.0),
    entry(
        "b", loss=None, state="failed", message="rank 1: out of memory", recipe="mnist", started=2.0, tokens=5_000_000
    ),
    entry("a", loss=1.5, step=90, valid=1.7, tags=["lr-sweep"], started=1.0, lr=0.01),
    entry("broken", state=UNREADABLE, recipe=None, world_size=None, tags=None, message="damaged", started=None),
]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", "c b a broken"),
        ("state:failed", "b"),
        ("cause:memory", "b"),
        ("loss<2", "a"),
        ("loss<4 !tags:lr", "c"),
        ("tokens>1e6", "b"),
        ("step:10-50", "c"),
        ("recipe=lm", "c a"),
        ("recipe:mni", "b"),
        ("recipe:nist", ""),
        ("recipe:*nist", "b"),
        ("recipe:m*t", "b"),
        ("tags:sweep", "a"),
        ("note:one", "c"),
        ("note:ne", ""),
        ("good", "c"),
        ("BASE", "c"),
        ("valid!=1.7", ""),
        ("lr:1e-2", "a"),
        ("lr:1e-3-2e-2", "a"),
        ("loss:-1-2", "a"),
        ("!state:unreadable", "c b a"),
    ],
)
def test_runs_are_filtered_by_the_titles_of_their_columns(text: str, kept: str) -> None:
    wanted = run_filter(text)
    assert [run["id"] for run in RUNS if wanted.keeps(run)] == kept.split()


SIGKILL = "the process was ended by SIGKILL"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"message": SIGKILL, "failed_rank": 1, "failed_host": "fh2"}, f"rank 1 on fh2: {SIGKILL}"),
        ({"message": "no label", "failed_rank": 1, "failed_step": 50}, "rank 1 in step 50: no label"),
        ({"message": "NaN at step 50", "failed_rank": 1, "failed_step": 50}, "rank 1: NaN at step 50"),
        ({"message": SIGKILL, "failed_rank": 0, "restarts": 2}, f"after 2 restarts: rank 0: {SIGKILL}"),
        ({"message": "rank 1 hangs at a.py:2", "failed_rank": 1, "failed_host": "fh2"}, "rank 1 hangs at a.py:2"),
        ({"message": "rank 12 lost rank 1", "failed_rank": 2, "failed_host": "a"}, "rank 2 on a: rank 12 lost rank 1"),
        ({"message": "a with ranks 2, 3 lost", "failed_rank": 2, "failed_host": "a"}, "a with ranks 2, 3 lost"),
        ({"message": "node 0 was killed by SIGKILL", "failed_host": "fh1"}, "node 0 was killed by SIGKILL"),
        ({"message": SIGKILL, "failed_rank": 1, "finding": "rank 2 slow"}, f"rank 1: {SIGKILL}"),
        ({"state": "starting", "message": "planned, not started"}, "planned, not started"),
        ({"state": "finished", "finding": "rank 2 slow"}, "rank 2 slow"),
        ({"state": "finished", "jobs": 1}, ""),
        ({"state": "finished", "jobs": 2}, "in 2 jobs"),
        (
            {"message": SIGKILL, "failed_rank": 1, "jobs": 3, "restarts": 1},
            f"in 3 jobs after 1 restart: rank 1: {SIGKILL}",
        ),
    ],
)
def test_the_cause_of_a_failed_run_names_its_rank_and_host_once(values: dict[str, Any], text: str) -> None:
    assert cause(entry("a", **{"state": "failed", **values})) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("los<2", "filter 'los<2': no column 'los'; did you mean 'loss'?"),
        ("state:failled", "filter 'state:failled': no state is 'failled'; did you mean 'failed'?"),
        ("!state=fail", "filter 'state=fail': no state is 'fail'; did you mean 'failed'?"),
        ("note<3", "filter 'note<3': note is text; write note:WORD or note=WHOLE"),
        ("loss<low", "filter 'loss<low': expected a number, such as loss>5"),
        ("step:many", "filter 'step:many': expected numbers or ranges, such as step:0-7,12"),
    ],
)
def test_an_invalid_filter_is_refused_with_the_allowed_columns(text: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        run_filter(text)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "reverse", "order"),
    [
        ("started", False, "c b a broken"),
        ("started", True, "a b c broken"),
        ("loss", False, "a c b broken"),
        ("loss", True, "c a b broken"),
        ("step", False, "a c b broken"),
        ("run", False, "a b c broken"),
        ("tags", False, "c a b broken"),
    ],
)
def test_runs_without_a_value_come_last_whichever_way_they_are_sorted(key: str, reverse: bool, order: str) -> None:
    assert [run["id"] for run in sorted_runs(RUNS, key, reverse=reverse)] == order.split()


def test_a_loss_that_is_no_number_comes_last() -> None:
    runs = [entry("x", loss=3.0), entry("y", loss=float("nan")), entry("z", loss=1.0)]
    assert [run["id"] for run in sorted_runs(runs, "loss")] == ["z", "x", "y"]


def test_a_column_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="no column 'startd' to sort by; did you mean 'started'"):
        sorted_runs(RUNS, "startd")


@pytest.mark.parametrize("message", ["ValueError: " + "a batch of another shape, " * 12, "x"], ids=["long", "short"])
def test_long_notes_and_tags_leave_a_row_of_a_pipe_within_200_columns(tmp_path: Path, message: str) -> None:
    run = make_run(tmp_path, status="failed", message=message)
    tags = [f"tag-{number}-of-a-sweep" for number in range(20)]
    known = {**summarize(run, now=run.status.started), "note": "a note about 訓練 " * 60, "tags": tags, "lr": 0.001}
    lines = report([{**known, "valid": 0.51234, "tokens": 1_234_567_890}]).splitlines()
    assert max(map(width, lines)) <= 200
    assert lines[1].endswith("…")
    assert lines[1].count("…") == (3 if len(message) > 1 else 2)
    assert message[:40] in lines[1]


def test_a_long_cause_is_cut_where_no_terminal_limits_the_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="failed", message="ValueError: " + "a batch of another shape, " * 12)
    assert len(run.status.message or "") > 300
    line = report([summarize(run, now=run.status.started)]).splitlines()[1]
    assert len(line) <= 200
    assert line.endswith("…")
