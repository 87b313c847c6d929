from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from row_texts import row_text
from run_in_memory import run_in_memory

from gputrain_tui.console.ramp import DARK, HEAT_LEVELS, LIGHT, PLAIN, SIXTEEN, SIXTEEN_LIGHT, Ramp
from gputrain_tui.console.widgets.drawing import group_size
from gputrain_tui.console.widgets.lateness_map import (
    Heat,
    draw_heat,
    heat_columns,
    map_rows,
    thresholds,
    usual_step_ms,
)
from gputrain_tui.history.series import Series
from gputrain_tui.state.totals import PHASES
from trainer.contract.record import Step

RUN = run_in_memory()


def heat(width: int, height: int) -> Heat:
    group = group_size(16, 2 * map_rows(height))
    return Heat(
        columns=heat_columns(RUN.series, width - 8, group),
        ranks=16,
        group=group,
        first_step=1,
        last_step=200,
        step_ms=100.0,
        latest=RUN.state.latest(),
        selected=5,
    )


@pytest.mark.parametrize(("width", "end"), [(98, "■ 25 ■ 50 ■+"), (58, " 50+ ms")])
def test_the_legend_says_that_its_last_colour_has_no_end(width: int, end: str) -> None:
    title = row_text(draw_heat(heat(width, 10), width, 10)[0])
    assert title.startswith("late 60.33 ms  rank 5 "), "more than the last limit"
    assert title.rstrip(" ─").endswith(end)


@pytest.mark.parametrize("width", [36, 38, 46, 58, 70, 76, 80, 98, 198])
def test_the_legend_stays_whichever_rank_is_the_latest(width: int) -> None:
    legends = set()
    for latest in (None, (5, 60.33), (15, 0.00215), (0, 1234.0)):
        shown = replace(heat(width, 10), latest=latest)
        legends.add(row_text(draw_heat(shown, width, 10)[0]).rpartition("─")[2])
    assert len(legends) == 1
    assert " 50" in legends.pop()


@pytest.mark.parametrize(("width", "height"), [(40, 6), (58, 10), (98, 18)])
def test_a_rank_that_becomes_late_stands_out_from_then_on(width: int, height: int) -> None:
    rows = draw_heat(heat(width, height), width, height, symbols=True)
    assert [len(row_text(row)) for row in rows] == [width] * height
    assert row_text(rows[0]).startswith("late 60.33 ms  rank 5 " if width > 40 else "late 60.33 ")
    assert row_text(rows[-1]).rstrip().endswith("step 200")
    lines = [row_text(row)[8:] for row in rows[1:-1]]
    assert [row_text(row)[:8].strip() for row in rows[1:-1] if "#" in row_text(row)] == ["▸5"]
    late = next(line for line in lines if "#" in line)
    assert late.rstrip("#") == late[: late.index("#")]
    assert abs(late.index("#") - len(late) // 2) <= 1


def test_two_ranks_share_a_line_in_halves() -> None:
    rows = draw_heat(heat(58, 10), 58, 10)
    line = next(row for row in rows if "▸5" in row_text(row))
    assert "▀" in row_text(line)


@pytest.mark.parametrize(("ranks", "rows", "size"), [(2, 8, 1), (16, 8, 1), (17, 8, 2), (1024, 16, 32), (1000, 5, 104)])
def test_ranks_share_half_lines_only_where_they_must(ranks: int, rows: int, size: int) -> None:
    assert group_size(ranks, 2 * rows) == size
    assert math.ceil(ranks / size) <= 2 * rows


def test_a_group_shows_its_latest_rank() -> None:
    assert max(max(column) for column in heat_columns(RUN.series, 50, 8)) > 50


def test_a_balanced_run_stays_cool() -> None:
    limits = thresholds(300.0)
    assert limits == sorted(limits)
    assert len(limits) == HEAT_LEVELS - 1
    assert limits[1] == 6.0


def test_a_tenth_of_a_step_is_warm_in_every_run() -> None:
    warm = next(level for level, colour in enumerate(DARK.heat) if colour == "#c0a04a")
    assert [thresholds(step_ms)[warm - 1] for step_ms in (3.0, 300.0, 4321.0)] == [0.3, 30.0, 430.0]


def test_one_stall_changes_no_other_cell() -> None:
    def drawn(stall_ms: float) -> list[str]:
        columns = [[0.0, 40.0, 0.0, 0.0] for _ in range(40)]
        columns[20] = [0.0, 40.0, stall_ms, 0.0]
        drawn_heat = Heat(columns=columns, ranks=4, group=1, first_step=1, last_step=40, step_ms=300.0)
        return [row_text(row) for row in draw_heat(drawn_heat, 48, 6, symbols=True)]

    calm, stalled = drawn(0.0), drawn(60_000.0)
    differing = [(a, b) for line, other in zip(calm, stalled, strict=True) for a, b in zip(line, other, strict=True)]
    assert [pair for pair in differing if pair[0] != pair[1]] == [("·", "#")]


def test_the_usual_step_is_a_median_that_no_stall_moves() -> None:
    series = Series(2)
    for number in range(1, 101):
        for rank in range(2):
            duration = 90_000.0 if number == 50 else 100.0
            series.apply(
                Step(
                    time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=1, loss=1.0, step_ms=duration
                )
            )
    assert usual_step_ms(series) == 100.0


@pytest.mark.parametrize(
    ("ranks", "height", "labels"),
    [
        (2, 6, ["0", "", "1", ""]),
        (3, 6, ["0", "1", "2", ""]),
        (8, 6, ["0–1", "2–3", "4–5", "6–7"]),
        (1024, 6, ["0–255", "256…", "512…", "768…"]),
    ],
)
def test_every_group_of_ranks_is_labelled(ranks: int, height: int, labels: list[str]) -> None:
    group = group_size(ranks, 2 * map_rows(height))
    columns = [[5.0] * -(-ranks // group) for _ in range(30)]
    drawn_heat = Heat(columns=columns, ranks=ranks, group=group, first_step=1, last_step=30, step_ms=100.0)
    rows = draw_heat(drawn_heat, 40, height)[1:-1]
    assert [row_text(row)[:8].strip() for row in rows] == labels


def test_failed_selected_and_flagged_ranks_have_their_own_labels() -> None:
    columns = [[5.0] * 8 for _ in range(30)]
    drawn_heat = Heat(
        columns=columns, ranks=8, group=1, first_step=1, last_step=30, step_ms=100.0,
        failed={1}, flagged={1, 5}, selected=3,
    )  # fmt: skip
    rows = draw_heat(drawn_heat, 40, 6)[1:-1]
    assert [row_text(row)[:8].strip() for row in rows] == ["✗1", "▸3", "!5", "6–7"]


def test_one_rank_alone_is_never_late() -> None:
    alone = Heat(columns=[], ranks=1, group=1, first_step=0, last_step=0)
    assert "two ranks" in "".join(map(row_text, draw_heat(alone, 60, 8)))


@pytest.mark.parametrize(
    "ramp",
    [DARK, LIGHT, SIXTEEN, SIXTEEN_LIGHT, PLAIN],
    ids=["dark", "light", "16 colours", "16 colours on light", "no colours"],
)
def test_every_ramp_has_all_levels_and_parts(ramp: Ramp) -> None:
    assert len(ramp.heat) == HEAT_LEVELS
    assert len(ramp.phases) == len(PHASES)


def test_no_map_leaves_its_cells() -> None:
    source = random.Random(2)
    for _ in range(200):
        width, height, ranks = source.randrange(1, 120), source.randrange(1, 30), source.randrange(1, 3000)
        group = group_size(ranks, 2 * map_rows(height))
        groups = -(-ranks // group)
        columns = [
            [source.choice((math.nan, 0.0, 5.0, 1e9)) for _ in range(groups)] if source.random() < 0.9 else []
            for _ in range(width)
        ]
        drawn_heat = Heat(columns=columns, ranks=ranks, group=group, first_step=1, last_step=source.randrange(1, 10**9))
        rows = draw_heat(drawn_heat, width, height, symbols=source.random() < 0.5)
        assert len(rows) == height
        assert all(len(row_text(row)) == width for row in rows)
