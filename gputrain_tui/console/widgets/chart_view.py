"""Range of steps, horizontal axis and cursor that the charts of a screen share. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan

from gputrain_tui.console.widgets.drawing import Row, format_short, nice_step
from gputrain_tui.history.series import Window, fill_gaps
from gputrain_tui.history.step_axis import AXES, AxisName, StepAxis
from gputrain_tui.tables import duration

FINE = 4
"""Columns of equally many steps that are read per column of another axis, so that few of its columns stay empty."""
LEAST_STEPS = 8
LABEL_CELLS = 6
"""Cells of a label at the left of a chart."""


@dataclass
class ChartView:
    """Range, axis and cursor of all charts of a screen."""

    axis: AxisName = "step"
    span: tuple[int, int] | None = None
    """First and last step to show; None: the whole run, or its last steps."""
    cursor: int | None = None
    """Step whose values the charts show in their titles; None: no cursor."""

    def next_axis(self, series: StepAxis) -> None:
        """Change to the next axis that the run has values for."""
        order = AXES[AXES.index(self.axis) + 1 :] + AXES
        self.axis = next(name for name in order if series.has(name))

    def move(self, default_span: tuple[int, int], columns: int, shift: int) -> None:
        """Move the cursor by ``shift`` of a chart's columns; without a cursor, put one on the newest step.

        ``default_span``: first and last step to show without a span.
        """
        first, last = self.span or default_span
        if last < first or not last:
            return
        if self.cursor is None:
            self.cursor = last
            return
        step = max(round((last - first + 1) / max(columns, 1)), 1)
        self.cursor = min(max(self.cursor + shift * step, first), last)

    def zoom(self, default_span: tuple[int, int], *, closer: bool) -> None:
        """Show half as many steps, around the cursor or else the newest ones; if not ``closer``, twice as many."""
        first, last = self.span or default_span
        count = last - first + 1
        count = max(count // 2, LEAST_STEPS) if closer else count * 2
        if count >= default_span[1] - default_span[0] + 1:
            self.span = None
            return
        middle = self.cursor if self.cursor is not None else last if closer else (first + last) // 2
        begin = min(max(middle - count // 2, default_span[0]), default_span[1] - count + 1)
        self.span = begin, begin + count - 1

    def show_range(self, first: int, last: int) -> None:
        """Show the steps from one to another, in either order, and at least ``LEAST_STEPS``."""
        first, last = min(first, last), max(first, last)
        self.span = first, max(last, first + LEAST_STEPS - 1)

    def back(self) -> bool:
        """Remove the cursor, or else the range; return False if there is neither."""
        if self.cursor is not None:
            self.cursor = None
        elif self.span is not None:
            self.span = None
        else:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class XAxis:
    """Horizontal axis of one chart."""

    name: AxisName = "step"
    first_step: int
    last_step: int
    at: Callable[[float], float] = float

    @property
    def begin(self) -> float:
        """Position where the first step begins."""
        return self.at(self.first_step - 1) if self.name != "step" else float(self.first_step)

    @property
    def end(self) -> float:
        """Position where the last step ends."""
        return self.at(self.last_step) if self.name != "step" else float(self.last_step + 1)

    def column(self, step: float, columns: int) -> int:
        """Return the column of a step; below 0 or from ``columns`` on if it lies outside."""
        length = self.end - self.begin
        if length <= 0:
            return 0
        position = (step if self.name == "step" else self.at(step)) - self.begin
        if self.name != "step" and position > 0:
            position -= 1e-9 * length  # a step's end belongs to its column, not to the next one
        return int(position / length * columns) if position >= 0 else -1

    def step_at(self, column: int, columns: int) -> int:
        """Return the first step at or after the beginning of a column, at most the last step."""
        steps = range(self.first_step, self.last_step)
        return self.first_step + bisect_left(steps, column, key=lambda step: self.column(step, columns))

    def labels(self, width: int) -> Row:
        """Return the labels below a chart of ``width`` cells."""
        last = self.end if self.name != "step" else float(self.last_step)
        cells_per_label = 9 if self.name == "step" else 12
        newest = self._text(last, newest=True)
        text = position_labels(width, self.begin, self.end, last, cells_per_label, self._text, newest)
        return [(text, "axis")]

    def _text(self, position: float, *, newest: bool = False) -> str:
        if self.name == "time":
            return duration(position)
        if self.name == "step":
            return f"step {position:,.0f}" if newest else f"{position:,.0f}"
        text = format_short(position, 7).strip()
        return f"{text} {self.name}" if newest else text


def position_labels(
    width: int, begin: float, end: float, last: float, cells_per_label: int, text: Callable[[float], str], newest: str
) -> str:
    """Return the labels below a chart: round positions before ``last`` where they fit, and ``newest`` at the right.

    ``begin`` and ``end`` are the positions of the plot's edges.
    """
    cells = width - LABEL_CELLS - 2
    line = [" "] * width
    free = max(width - len(newest), 0)
    line[free:] = newest
    if last <= begin:
        return "".join(line)
    distance = max(nice_step(last - begin, max(1, cells // cells_per_label)), 1.0)
    busy, number = LABEL_CELLS, ceil(begin / distance)
    while number * distance < last:
        label = text(number * distance)
        column = LABEL_CELLS + 2 + int((number * distance - begin) / (end - begin) * cells)
        if column > busy and column + len(label) + 2 <= free:
            line[column : column + len(label)] = label
            busy = column + len(label) + 2
        number += 1
    return "".join(line)


def on_axis(window: Window, x: XAxis, columns: int) -> Window:
    """Return a band whose columns have equally many steps, resampled to columns of equal length on another axis."""
    if x.name == "step":
        return window
    groups: list[list[int]] = [[] for _ in range(columns)]
    steps_per_column = (window.last_step - window.first_step + 1) / len(window.middle)
    for index, value in enumerate(window.middle):
        column = x.column(window.first_step + (index + 0.5) * steps_per_column - 0.5, columns)
        if value == value and 0 <= column < columns:
            groups[column].append(index)
    finite = [[window.middle[index] for index in group if isfinite(window.middle[index])] for group in groups]
    pairs = list(zip(groups, finite, strict=True))
    low = [min(window.low[index] for index in group) if part else nan for group, part in pairs]
    middle = [sum(part) / len(part) if part else nan for part in finite]
    high = [max(window.high[index] for index in group) if part else nan for group, part in pairs]
    for values in (low, middle, high):
        fill_gaps(values)
    return Window(first_step=window.first_step, last_step=window.last_step, low=low, middle=middle, high=high)


def line_on_axis(values: Sequence[float], x: XAxis, columns: int) -> list[float]:
    """Return one rank's line, resampled like a band by ``on_axis``."""
    window = Window(first_step=x.first_step, last_step=x.last_step, low=[*values], middle=[*values], high=[*values])
    return on_axis(window, x, columns).middle
