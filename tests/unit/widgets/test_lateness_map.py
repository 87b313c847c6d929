from __future__ import annotations

import math
import random

import pytest
from run_in_memory import run_in_memory

from gputrain_tui.console.ramp import DARK, HEAT_LEVELS, LIGHT, PHASE_COLOURS, PLAIN, SIXTEEN, SIXTEEN_LIGHT, Ramp
from gputrain_tui.console.widgets.drawing import group_size, row_text
from gputrain_tui.console.widgets.lateness_map import (
    Heat,
    draw_heat,
    heat_columns,
    map_rows,
    thresholds,
)

RUN = run_in_memory()


def heat(width: int, height: int) -> Heat:
    group = group_size(16, 2 * map_rows(height))
    return Heat(
        columns=heat_columns(RUN.series, width - 8, group),
        ranks=16,
        group=group,
        first_step=1,
        last_step=200,
        step_ms=260.0,
        slowest=RUN.state.slowest(),
        selected=5,
    )


@pytest.mark.parametrize(("width", "height"), [(40, 6), (58, 10), (98, 18)])
def test_a_rank_that_becomes_late_stands_out_from_then_on(width: int, height: int) -> None:
    rows = draw_heat(heat(width, height), width, height, symbols=True)
    assert [len(row_text(row)) for row in rows] == [width] * height
    assert row_text(rows[0]).startswith("late 64.65 ms  rank 5 ")
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
    limits = thresholds(6.0, 300.0)
    assert limits[0] > 6.0
    assert len(limits) == HEAT_LEVELS - 1


def test_the_hottest_level_is_within_what_was_measured() -> None:
    limits = thresholds(500.0, 300.0)
    assert limits == sorted(limits)
    assert 250 <= limits[-1] <= 500


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
    assert len(ramp.phases) == len(PHASE_COLOURS)


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
        shown = Heat(columns=columns, ranks=ranks, group=group, first_step=1, last_step=source.randrange(1, 10**9))
        rows = draw_heat(shown, width, height, symbols=source.random() < 0.5)
        assert len(rows) == height
        assert all(len(row_text(row)) == width for row in rows)
