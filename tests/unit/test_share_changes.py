"""Balanced shares in the state of a run and in every view of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import synthetic
from row_texts import row_text
from test_diagnosis import SimulatedRun, balanced, late, summaries
from test_diagnosis_speeds import of_speeds
from test_headless import trained

from gputrain_tui.console.widgets.findings import draw_findings, finding_entries
from gputrain_tui.console.widgets.rank_columns import COLUMNS, layout, whole_width
from gputrain_tui.console.widgets.rank_facts import facts
from gputrain_tui.console.widgets.rank_table import GridView, draw_grid
from gputrain_tui.headless.closing_report import closing_lines, closing_table
from gputrain_tui.headless.progress import event_line, paint
from gputrain_tui.history.run_folders import open_run
from gputrain_tui.history.summary import summarize
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from gputrain_tui.state.share_changes import CAUSES, change_text, shares_text
from trainer.contract.record import RankState, ShareChange


def changed(step: int, shares: Sequence[int], cause: Any = "measured", **fields: Any) -> ShareChange:
    previous = fields.pop("previous", [32, 32])
    return ShareChange(time=1000.0 + step, step=step, previous=previous, shares=list(shares), cause=cause, **fields)


START = changed(1, [32, 32], "start", previous=[])
MEASURED = changed(
    31, [48, 16], fixed_ms=[1.5, 2.0], per_sample_ms=[0.5, 1.94], slowest_ms=64.0, expected_ms=33.04
)  # fmt: skip


def seen(*changes: ShareChange) -> RunState:
    state = trained()
    state.apply_all(changes)
    return state


TEXTS: list[tuple[ShareChange, str]] = [
    (START, "shares 32, 32 from step 1 on: equal at the start"),
    (
        MEASURED,
        "shares 48, 16 from step 31 on instead of 32, 32: by measured speeds; the slowest rank should compute 33.0 ms "
        "instead of 64.0 ms",
    ),
    (
        changed(31, [48, 16], slowest_ms=64.0, expected_ms=33.0, measured_ms=34.2),
        "shares 48, 16 from step 31 on instead of 32, 32: by measured speeds; the slowest rank computes 34.2 ms "
        "instead of 64.0 ms (33.0 ms expected)",
    ),
    (changed(50, [40, 24], "memory"), "shares 40, 24 from step 50 on instead of 32, 32: a rank ran out of memory"),
    (changed(401, [48, 16], "resumed", previous=[]), "shares 48, 16 from step 401 on: as before the start"),
]


@pytest.mark.parametrize(("change", "text"), TEXTS, ids=[change.cause for change, _ in TEXTS])
def test_a_change_is_told_with_old_and_new_shares_its_cause_and_its_gain(change: ShareChange, text: str) -> None:
    assert change_text(change) == text


def test_the_shares_of_many_ranks_are_told_shortly() -> None:
    assert shares_text([*range(1, 9)]) == "1, 2, 3, 4, 5, 6, 7, 8"
    assert shares_text([16] * 63 + [1024]) == "16 to 1,024 on 64 ranks"


def test_each_rank_has_its_share_and_its_fit_and_a_change_that_was_measured_counts_once() -> None:
    state = seen(START)
    assert [view.share for view in state.ranks.values()] == [32, 32]
    assert [view.fit for view in state.ranks.values()] == [None, None]
    state.apply(MEASURED)
    state.apply(changed(31, [48, 16], slowest_ms=64.0, expected_ms=33.0, measured_ms=34.2))
    assert [view.share for view in state.ranks.values()] == [48, 16]
    assert [view.fit and view.fit.of(10) for view in state.ranks.values()] == [6.5, 21.4]
    assert [change.step for change in state.shares.changes] == [1, 31]
    assert state.shares.newest is not None
    assert state.shares.newest.measured_ms == 34.2


def test_every_cause_has_its_words() -> None:
    causes = get_args(get_type_hints(ShareChange)["cause"])
    assert set(CAUSES) == set(causes)


def test_the_status_has_the_newest_shares_while_the_run_goes_on_and_at_its_end(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, status="running")
    plan = Plan(world_size=2, init_method=None, backend="gloo", launcher="local", nodes=[])
    writer = RunStatusWriter(run.dir, plan, now=lambda: synthetic.BEGIN + 60)
    assert summarize(run, now=synthetic.BEGIN)["shares"] is None
    state = seen(START)
    for shares in ([32, 32], [48, 16]):
        writer.follow(state)
        found = open_run(run.dir.path)
        assert found is not None
        assert summarize(found, now=synthetic.BEGIN)["shares"] == shares
        state.apply(MEASURED)
    state.apply(changed(60, [50, 14], previous=[48, 16]))
    writer.close(AttemptResult(status="finished"), left=[], state=state)
    found = open_run(run.dir.path)
    assert found is not None
    assert summarize(found, now=synthetic.BEGIN)["shares"] == [50, 14]


def test_a_progress_view_prints_changes_but_not_the_equal_start() -> None:
    assert event_line(START) is None
    line = event_line(MEASURED)
    assert line is not None
    assert paint(line, colour=False) == change_text(MEASURED)
    line = event_line(changed(31, [48, 16], slowest_ms=64.0, expected_ms=33.0, measured_ms=34.2))
    assert line is not None
    assert paint(line, colour=False) == (
        "with shares 48, 16 the slowest rank computes 34.2 ms instead of 64.0 ms (33.0 ms expected)"
    )


def test_the_closing_table_has_the_shares_only_where_they_are_balanced() -> None:
    titles = closing_table(seen(), 160)[0][0][0]
    assert "share" not in titles.split()
    titles, first, second = (line[0][0] for line in closing_table(seen(START, MEASURED), 160))
    at = titles.index("share") + len("share")
    assert (first[:at].split()[-1], second[:at].split()[-1]) == ("48", "16")
    lines = [paint(line, colour=False) for line in closing_lines(seen(START, MEASURED), 160)]
    assert f"shares     {change_text(MEASURED).removeprefix('shares ')}" in lines
    assert not any(paint(line, colour=False).startswith("shares") for line in closing_lines(seen(), 160))


def test_the_rank_table_has_a_column_of_shares_only_where_they_are_balanced() -> None:
    keys = [column.key for column in COLUMNS]
    assert [place.column.key for place in layout(200, 2, {"a", "b"}, balanced=True)] == keys
    assert "share" not in [place.column.key for place in layout(200, 2, {"a", "b"})]
    assert whole_width(2, {"a"}, balanced=True) > whole_width(2, {"a"})
    state = seen(START, MEASURED)
    views = list(state.ranks.values())
    titles, *lines = [row_text(row) for row in draw_grid(GridView(rows=views, ranks=2, balanced=True), 160, 5)][1:4]
    at = titles.index("share") + len("share")
    assert [line[:at].split()[-1] for line in lines] == ["48", "16"]


def test_the_rank_screen_shows_share_and_fit() -> None:
    shown = {name: value for name, value, _ in facts(seen(START, MEASURED), 1, 2000.0)}
    assert (shown["share"], shown["fixed ms"], shown["ms per unit"]) == ("16", "2.000", "1.940")
    assert not {"share", "fixed ms"} & {name for name, *_ in facts(seen(), 1, 2000.0)}


def test_the_findings_view_lists_the_newest_changes() -> None:
    changes = [changed(step, [64 - step % 7, step % 7]) for step in range(101, 109)]
    entries = finding_entries(seen(START, *changes))
    assert [(entry.severity, entry.message) for entry in entries] == [
        ("info", change_text(change)) for change in reversed(changes[-5:])
    ]
    texts = [row_text(row) for row in draw_findings(entries[:1], 160, 4)]
    assert "run       shares" in texts[1]
    assert texts[0].startswith("findings 0  1 change of shares")


def test_work_before_a_change_of_shares_is_not_compared_with_work_after_it() -> None:
    """A rank that is slow until its share is smaller is no straggler, and no other rank is one after that."""
    run = SimulatedRun(2, device="cuda:0")
    run.state.apply(ShareChange(time=run.now, step=1, previous=[], shares=[48, 48], cause="start"))
    assert run.steps(22, of_speeds([1.0, 3.0])) == []
    run.state.apply(ShareChange(time=run.now, step=23, previous=[48, 48], shares=[72, 24], cause="measured"))
    assert run.steps(300, of_speeds([1.4, 1.4])) == []
    found = run.steps(60, late(1, first=1, data=60.0))
    assert summaries(found) == [("straggler", "raised", 1, "data")]


def test_balanced_shares_raise_no_uneven_speeds_and_a_rank_that_they_cannot_help_is_a_straggler() -> None:
    run = SimulatedRun(2, device="cuda:0")
    run.state.apply(ShareChange(time=run.now, step=1, previous=[], shares=[48, 48], cause="start"))
    found = run.steps(200, of_speeds([1.0, 3.0]))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]
    assert "batch_size" not in found[0].advice, "it is balanced already"
    even = SimulatedRun(2)
    even.state.apply(ShareChange(time=even.now, step=1, previous=[], shares=[48, 48], cause="start"))
    assert even.steps(300, balanced) == []


@pytest.mark.parametrize(
    ("hosts", "kept", "left_out"), [(("h1", "h1"), "optimizer", "host"), (("h1", "h2"), "host", "optimizer")]
)
def test_of_several_hosts_a_narrow_table_keeps_the_host_of_each_share(
    hosts: tuple[str, str], kept: str, left_out: str
) -> None:
    state = seen(START, MEASURED)
    for rank, host in enumerate(hosts):
        state.apply(RankState(time=1000.0, rank=rank, state="training", host=host))
    titles = closing_table(state, 80)[0][0][0].split()
    assert kept in titles
    assert left_out not in titles
