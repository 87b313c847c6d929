from __future__ import annotations

import random
import re

import pytest
from row_texts import row_text
from run_in_memory import run_in_memory

from gputrain_tui.console.widgets.step_bars import Bar, bars, draw_bars
from gputrain_tui.state import RankView

RUN = run_in_memory()
VIEWS = [RUN.state.ranks[rank] for rank in sorted(RUN.state.ranks)]


@pytest.mark.parametrize(("width", "height"), [(40, 6), (58, 9), (98, 18)])
def test_the_phases_of_a_step_are_stacked_in_their_order(width: int, height: int) -> None:
    rows = [row_text(row) for row in draw_bars(bars(VIEWS, height - 1, 5), width, height, step_ms=273.1, symbols=True)]
    assert [len(row) for row in rows] == [width] * height
    assert rows[0].startswith("step 273.1 ms ")
    phases = [re.sub(r"(.)\1*", r"\1", row[8:].split()[0]) for row in rows[1:] if row.strip()]
    assert phases
    assert set(phases) <= {"▒█▓░▞·", "█▓░▞·", "▒█▓░▞", "█▓░▞", "▒█▓░", "█▓░", "█▓░·"}


def test_the_selected_rank_stands_above_the_groups() -> None:
    lines = bars(VIEWS, 5, 7)
    assert [line.label for line in lines] == ["7", "0–3", "4–7", "8–11", "12–15"]
    assert [line.selected for line in lines] == [True, False, False, False, False]


def test_ranks_with_a_finding_have_their_own_bars_among_groups() -> None:
    lines = bars(VIEWS, 8, 7, [5, 11])
    assert [(line.label, line.flagged) for line in lines[:3]] == [("7", False), ("5", True), ("11", True)]
    assert len(lines) <= 8
    assert "▲5" in "".join(map(row_text, draw_bars(lines, 60, 9)))


def test_every_rank_has_its_bar_where_there_is_room() -> None:
    assert [line.label for line in bars(VIEWS, 16, None)] == [str(rank) for rank in range(16)]


def test_a_bar_ends_where_its_step_ends() -> None:
    lines = [Bar(label="0", phases=(50.0, 50.0, 0, 0, 0, 0)), Bar(label="1", phases=(25.0, 25.0, 0, 0, 0, 0))]
    rows = draw_bars(lines, 56, 3)
    whole, half = (row_text(row)[8:48] for row in rows[1:])
    assert whole == "█" * 40
    assert half == "█" * 20 + " " * 20


def test_bars_without_measurements_show_a_note() -> None:
    assert bars([RankView(0)], 5, None) == []
    assert "not measured yet" in "".join(map(row_text, draw_bars([], 60, 5)))


def test_no_bar_leaves_its_cells() -> None:
    source = random.Random(5)
    for _ in range(200):
        width, height = source.randrange(1, 120), source.randrange(1, 20)
        phases = [tuple(source.choice((0.0, 1e-9, 3.0, 1e6)) for _ in range(6)) for _ in range(source.randrange(30))]
        lines = [Bar(label=str(index), phases=p) for index, p in enumerate(phases)]
        rows = draw_bars(lines, width, height, symbols=source.random() < 0.5)
        assert len(rows) == height
        assert all(len(row_text(row)) == width for row in rows)
