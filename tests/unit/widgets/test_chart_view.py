from __future__ import annotations

import math

import pytest
from row_texts import row_text

from gputrain_tui.console.widgets.chart_view import ChartView, XAxis, line_on_axis, on_axis
from gputrain_tui.history.series import Series
from trainer.contract.record import Step


def series(steps: int = 100, *, tokens: bool = False) -> Series:
    """The second half of the steps takes three times as long."""
    found, time = Series(2), 0.0
    for number in range(1, steps + 1):
        duration = 0.1 if number <= steps // 2 else 0.3
        time += duration
        for rank in range(2):
            event = Step(
                time=time, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=float(number),
                step_ms=1e3 * duration, tokens=80 if tokens else None,
            )  # fmt: skip
            found.apply(event)
    return found


def x_axis(found: Series, name: str) -> XAxis:
    return XAxis(name=name, first_step=1, last_step=100, at=lambda step: found.axis.at(name, step))  # type: ignore[arg-type]


def test_the_axes_are_those_on_which_the_run_was_measured() -> None:
    for tokens, wanted in ((False, ["time", "samples", "step"]), (True, ["time", "samples", "tokens", "step"])):
        view, found = ChartView(), series(tokens=tokens)
        names = []
        for _ in wanted:
            view.next_axis(found.axis)
            names.append(view.axis)
        assert names == wanted


@pytest.mark.parametrize("name", ["step", "time", "samples"])
def test_a_column_and_its_first_step_belong_together(name: str) -> None:
    x = x_axis(series(), name)
    columns = [x.column(step, 40) for step in range(1, 101)]
    assert columns == sorted(columns)
    assert (columns[0], columns[-1]) == (0, 39)
    for column in set(columns):
        assert x.step_at(column, 40) == columns.index(column) + 1


def test_over_time_slow_steps_take_more_room() -> None:
    found = series()
    x = x_axis(found, "time")
    window = on_axis(found.window("loss", 160), x, 40)
    assert x.end == pytest.approx(20.0)
    assert x.column(50, 40) == 9
    assert window.middle[9] == pytest.approx(49, abs=2)
    assert window.middle[-1] == pytest.approx(99.5, abs=1)
    assert not any(map(math.isnan, window.middle))
    assert line_on_axis(found.window("loss", 160, rank=0).middle, x, 40) == pytest.approx(window.middle, abs=1)


def test_labels_are_round_positions_and_the_newest() -> None:
    found = series()
    assert row_text(x_axis(found, "step").labels(60)).split()[-2:] == ["step", "100"]
    assert row_text(x_axis(found, "time").labels(60)).rstrip().endswith("20 s")
    assert row_text(x_axis(found, "samples").labels(60)).split()[-2:] == ["1600", "samples"]


def test_the_cursor_begins_at_the_newest_step_and_stays_within_the_shown_ones() -> None:
    view = ChartView()
    view.move((1, 1000), 100, -1)
    assert view.cursor == 1000
    view.move((1, 1000), 100, -3)
    assert view.cursor == 970
    view.move((1, 1000), 100, 99)
    assert view.cursor == 1000
    view.span = (100, 109)
    view.move((1, 1000), 100, -1)
    assert view.cursor == 109


def test_zooming_halves_the_steps_around_the_cursor_and_ends_at_the_whole_run() -> None:
    view = ChartView(cursor=200)
    view.zoom((1, 1000), closer=True)
    assert view.span == (1, 500)
    view.zoom((1, 1000), closer=True)
    assert view.span == (75, 324)
    for _ in range(20):
        view.zoom((1, 1000), closer=True)
    assert view.span is not None
    assert view.span[1] - view.span[0] == 7
    for _ in range(8):
        view.zoom((1, 1000), closer=False)
    assert view.span is None


def test_one_step_back_removes_the_cursor_and_then_the_range() -> None:
    view = ChartView()
    view.show_range(30, 10)
    view.cursor = 20
    assert (view.back(), view.cursor, view.span) == (True, None, (10, 30))
    assert (view.back(), view.span) == (True, None)
    assert not view.back()
    view.show_range(5, 5)
    assert view.span == (5, 12)
