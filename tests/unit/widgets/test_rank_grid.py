from __future__ import annotations

import random
from itertools import pairwise

import pytest
from row_texts import row_text
from run_in_memory import run_in_memory

from gputrain_tui.console.widgets.rank_columns import (
    COLUMNS,
    RankRow,
    latest_of_groups,
    layout,
    rank_filter,
    sort_ranks,
)
from gputrain_tui.console.widgets.rank_facts import facts
from gputrain_tui.console.widgets.rank_table import GridView, draw_grid
from gputrain_tui.state import RankView
from gputrain_tui.state.process_groups import ProcessGroup
from trainer.contract.errors import RequestError
from trainer.contract.record import Failure, RankState, Step

RUN = run_in_memory()
RUN.apply(Failure(time=900.0, kind="exception", message="boom", rank=9, host="node001"))
VIEWS = list(RUN.state.ranks.values())
LATE = RUN.state.lateness()
HOSTS = {"node000", "node001"}


def row_of(view: RankView) -> RankRow:
    return RankRow(view, LATE.get(view.rank))


def grid(views: list[RankView] | None = None, **changes: object) -> GridView:
    settings: dict[str, object] = {
        "rows": VIEWS if views is None else views,
        "ranks": 16,
        "late": LATE,
        "warned": {5},
        "cursor": 2,
        "hosts": HOSTS,
        "failing": True,
        **changes,
    }
    return GridView(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "height"), [(40, 6), (78, 12), (118, 12), (198, 20)])
def test_the_cursor_the_warning_and_the_failure_are_marked_at_every_width(width: int, height: int) -> None:
    frame = [row_text(row) for row in draw_grid(grid(), width, height)]
    assert [len(line) for line in frame] == [width] * height
    assert frame[0].startswith("ranks 16  1 failed ")
    marks = {line[1:6].strip(): line[0] for line in frame[2:] if line.strip()}
    assert list(marks) == [str(rank) for rank in range(min(height - 2, 16))]
    assert {rank: mark for rank, mark in marks.items() if mark != " "} == {
        rank: mark for rank, mark in {"2": "▸", "5": "▲", "9": "✗"}.items() if rank in marks
    }
    if width >= 78:
        assert frame[7].index("60.3") > frame[1].index("late ms") - 2


def test_a_sorted_and_filtered_grid_names_its_order_and_filter() -> None:
    kept = [view for view in VIEWS if rank_filter("late>5").keeps(row_of(view))]
    rows = sort_ranks(kept, LATE, "late", descending=True)
    frame = [
        row_text(row) for row in draw_grid(grid(rows, sort_key="late", descending=True, filter_text="late>5"), 98, 8)
    ]
    assert frame[0].startswith("ranks 16  /late>5  1 ")
    assert frame[0].endswith(" by late ms, down")
    assert "▾late ms" in frame[1]
    assert [line[1:6].strip() for line in frame[2:]] == ["5", "", "", "", "", ""]


def test_of_each_group_the_rank_that_failed_is_shown_or_one_with_a_finding_or_the_latest() -> None:
    tp = [ProcessGroup("tp", tuple(range(first, first + 4))) for first in (0, 4, 8)]  # ranks 12 to 15 are in none
    late = dict.fromkeys(range(16), 0.0) | {2: 9.0, 6: 99.0, 10: 99.0}
    rows = latest_of_groups(VIEWS, tp, late, {5})
    assert [view.rank for view in rows] == [2, 5, 9, 12, 13, 14, 15]
    frame = [row_text(row) for row in draw_grid(grid(rows, late=late, one_of_each="tp"), 98, 9)]
    assert frame[0].startswith("ranks 16  1 failed  one of each tp  7 ")
    assert [line[1:6].strip() for line in frame[2:]] == ["2", "5", "9", "12", "13", "14", "15"]


def test_a_filter_that_keeps_nothing_is_named() -> None:
    frame = draw_grid(grid([], filter_text="host:moon"), 78, 6)
    assert "no rank matches 'host:moon'" in "".join(map(row_text, frame))
    assert "esc clears the filter" in "".join(map(row_text, frame))


@pytest.mark.parametrize(("still", "ended", "shown"), [(True, "", "no step"), (True, "unknown", "unknown")])
def test_a_rank_is_filtered_by_the_state_that_the_table_shows(still: bool, ended: str, shown: str) -> None:
    frame = [row_text(row) for row in draw_grid(grid(standing_still=still, ended=ended), 118, 18)]
    rows = [row_of(view)._replace(standing_still=still, ended=ended) for view in VIEWS]
    kept = {row.view.rank for row in rows if rank_filter(f"state:{shown.split()[-1]}").keeps(row)}
    assert kept == {rank for rank, line in enumerate(frame[2:]) if shown in line} == set(range(16)) - {9}


def test_a_norm_that_is_not_measured_in_every_step_is_the_newest_one_in_table_and_facts() -> None:
    run = run_in_memory(2, 2)
    run.apply(Step(time=950.0, rank=1, step=96, epoch=1, steps=1, samples=1, loss=1.0, local_grad_norm=2.125))
    run.apply(Step(time=951.0, rank=1, step=97, epoch=1, steps=1, samples=1, loss=1.0))
    frame = [row_text(row) for row in draw_grid(grid(list(run.state.ranks.values())), 160, 6)]
    assert frame[3][frame[1].index("g.own") - 1 :].split()[0] == "2.125"
    shown = {name: value for name, value, _ in facts(run.state, 1, 952.0)}
    assert (shown["step"], shown["own grad norm"], shown["own norm step"]) == ("97", "2.125", "96")


def test_ranks_that_have_not_started_show_dashes() -> None:
    frame = [row_text(row) for row in draw_grid(grid([RankView(0), RankView(1)], late={}), 118, 6)]
    for rank, line in enumerate(frame[2:4]):
        assert set(line.split()) == {str(rank), "–"}


@pytest.mark.parametrize("width", range(1, 220, 7))
def test_columns_never_overlap_nor_leave_the_grid(width: int) -> None:
    for hosts in ((), {"a"}, {"a", "n" * 60}):
        places = layout(width, 2048, hosts)
        ends = [2, *(place.end + 1 for place in places)]
        assert all(place.begin >= end for place, end in zip(places, ends, strict=False))
        assert all(place.end <= width for place in places)


def test_wide_grids_show_every_column() -> None:
    keys = [column.key for column in COLUMNS if column.key != "share"]  # of balanced shares only
    assert [place.column.key for place in layout(160, 1024, HOSTS)] == keys


@pytest.mark.parametrize("key", [column.key for column in COLUMNS])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_keeps_equal_ranks_in_order_and_absent_values_last(key: str, descending: bool) -> None:
    views = [*random.Random(5).sample(VIEWS, len(VIEWS)), RankView(99), RankView(98)]
    ordered = sort_ranks(views, LATE, key, descending=descending)
    assert sorted(view.rank for view in ordered) == sorted(view.rank for view in views)
    column = next(column for column in COLUMNS if column.key == key)
    values = [column.value(row_of(view)) for view in ordered]
    present = [value for value in values if value is not None]
    assert present == sorted(present, reverse=descending)  # type: ignore[type-var]
    assert values[: len(present)] == present
    for one, two in pairwise(ordered):
        if column.value(row_of(one)) == column.value(row_of(two)):
            assert one.rank < two.rank


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", set(range(16))),
        ("rank:3", {3}),
        ("rank:0-2,7", {0, 1, 2, 7}),
        ("7", {7}),
        ("host:001", set(range(8, 16))),
        ("node001", set(range(8, 16))),
        ("!host:001", set(range(8))),
        ("state:failed", {9}),
        ("state!=training", {9}),
        ("state:lost", set()),
        ("late>40", {5}),
        ("late>=0 rank<3", {0, 1, 2}),
        ("device=cuda:1", {1, 9}),
        ("HOST:NODE000 rank>6", {7}),
        ("loss<0", set()),
    ],
)
def test_a_rank_must_match_every_word_of_a_filter(text: str, kept: set[int]) -> None:
    found = rank_filter(text)
    assert {view.rank for view in VIEWS if found.keeps(row_of(view))} == kept


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hots:n1", "did you mean 'host'"),
        ("late>x", "expected a number, such as late>5"),
        ("rank:a", "such as rank:0-7,12"),
        ("host>3", "host is text"),
        ("bogus:1", "one of rank, host"),
        ("state:failled", "no state is 'failled'; did you mean 'failed'"),
    ],
)
def test_an_invalid_filter_is_refused_with_the_allowed_terms(text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        rank_filter(text)


def test_no_grid_leaves_its_cells() -> None:
    source = random.Random(11)
    run = run_in_memory(40, 3)
    for rank in range(0, 40, 3):
        run.apply(RankState(time=1e3, rank=rank, state="failed", host="h" * source.randrange(40), device="cpu"))
    views = list(run.state.ranks.values())
    for rank in (0, 1):
        last = views[rank].last
        assert last is not None
        last.loss, last.sync_exposed_ms, last.step = float("nan"), float("inf"), 10**12
    for _ in range(200):
        width, height = source.randrange(1, 230), source.randrange(1, 50)
        frame = draw_grid(
            grid(views, ranks=10**source.randrange(1, 7), top=source.randrange(40), focused=True,
                 hosts={view.host for view in views if view.host}),
            width, height,
        )  # fmt: skip
        assert len(frame) == height
        assert all(len(row_text(row)) == width for row in frame)
