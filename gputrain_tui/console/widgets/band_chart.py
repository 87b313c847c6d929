"""Chart of a metric of the followed run: median and band, curves of earlier runs, a cursor and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import TYPE_CHECKING

from textual.events import MouseDown, MouseEvent, MouseUp
from textual.message import Message

from gputrain_tui.console.widgets.chart_view import FINE, ChartView, XAxis, line_on_axis, on_axis
from gputrain_tui.console.widgets.curve_drawing import LABEL_CELLS, Curve, Scale, chart_columns, draw_curve
from gputrain_tui.console.widgets.drawing import Row, fit_row, format_short, format_value
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.comparison import CurvePoints, resampled
from gputrain_tui.history.series import BandMetric, Series, Window
from gputrain_tui.tables import duration
from trainer.contract.record import Validation

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun


class ChartDragged(Message):
    """The mouse was clicked at ``step`` of a chart, or dragged from there to ``until``."""

    def __init__(self, step: int, until: int | None = None) -> None:
        super().__init__()
        self.step = step
        self.until = until


@dataclass(frozen=True, kw_only=True)
class EarlierCurve:
    """Curves of an earlier run, drawn below those of the followed run."""

    name: str
    series: Series
    until: int | None = None
    """Step before which the curves are drawn, the one at which the run was resumed; None: all of them."""


class BandChart(Panel):
    """Chart of one metric of the run."""

    def __init__(
        self,
        live: LiveRun,
        metric: BandMetric,
        title: str,
        *,
        view: ChartView | None = None,
        empty: str = "no step yet",
        spiky: bool = False,
        id: str | None = None,
    ) -> None:
        super().__init__(live, id=id)
        self.metric: BandMetric = metric
        self.title_text = title
        self.empty_text = empty
        self.spiky = spiky
        self.view = view or ChartView()
        """Range, axis and cursor, shared by the charts of a screen."""
        self.earlier: Sequence[EarlierCurve] = ()
        """Earlier runs, drawn below the curve."""
        self.chart_scale: Scale = "linear"
        self.last: int | None = None
        """Steps to show; None: the whole run."""
        self.smoothing = 0
        """Steps over which the curves are smoothed; 0: not at all."""
        self._pressed: int | None = None
        """Step at which the mouse button was pressed."""

    def show(self, *, scale: Scale | None = None, last: int | None = None, smoothing: int | None = None) -> None:
        """Set the options of the chart; None leaves one as it is, except ``last``, where None is the whole run."""
        self.chart_scale = scale or self.chart_scale
        self.last = last
        self.smoothing = self.smoothing if smoothing is None else smoothing
        self.redraw()

    def seen_version(self) -> object:
        """Return a value that changes with the curves, the validations and the earlier runs."""
        validations = len(self.live.state.validations) if self.metric == "loss" else 0
        return self.live.series.version, validations, [each.series.version for each in self.earlier]

    @property
    def default_span(self) -> tuple[int, int]:
        """First and last step to show without a range; the steps of runs that were resumed are included."""
        first, last = self.live.series.span(self.last)
        if self.last is None and self.view.axis == "step":
            first = min(
                [first, *(each.series.first_step for each in self.earlier if each.until and each.series.first_step)]
            )
        return first, last

    @property
    def columns(self) -> int:
        """Columns of the curve, two per cell."""
        return chart_columns(self.size.width)

    def x_axis(self) -> XAxis:
        """Return the horizontal axis as it is drawn."""
        first, last = self.view.span or self.default_span
        axis = self.live.series.axis
        name = self.view.axis if axis.has(self.view.axis) else "step"
        return XAxis(name=name, first_step=first, last_step=last, at=partial(axis.at, name))

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the chart."""
        series, x, columns = self.live.series, self.x_axis(), chart_columns(width)
        window = self._window(series, x, columns)
        rank = self.selected_rank
        rank_line: list[float] = []
        if rank is not None:
            fine = columns if x.name == "step" else FINE * columns
            span = x.first_step, x.last_step
            rank_line = series.smoothed_window(self.metric, fine, rank=rank, span=span, over=self.smoothing).median
            rank_line = rank_line if x.name == "step" else line_on_axis(rank_line, x, columns)
        under = [self._below(each, x, columns) for each in self.earlier]
        remarks = [] if self.metric == "loss" else [f"mean of the {self.live.state.span}"]
        remarks += [] if self.last is None or self.view.span else [f"last {self.last:,}"]
        if self.view.span:
            remarks.append(f"steps {x.first_step:,}–{x.last_step:,}")
        if self.smoothing:
            remarks.append(f"smooth over {self.smoothing:,} steps")
        cells = columns // 2
        marks = [(x.column(each.step, cells), each.loss) for each in self._validations(x)]
        cursor = self.view.cursor
        cursor_column = None if cursor is None else x.column(cursor, columns)
        curve = Curve(
            title=self.title_text,
            unit=self.live.state.loss_unit if self.metric == "loss" else "",
            is_loss=self.metric == "loss",
            window=window,
            value=self._newest(),
            ranks=series.world_size,
            rank=rank,
            rank_line=rank_line,
            rank_value=None if rank is None else self._newest_of(rank),
            scale=self.chart_scale,
            remarks=(*(f"┈ {each.name}" for each in self.earlier), *remarks),
            empty=self.empty_text,
            spiky=self.spiky,
            blocks=self.ramp.shades,
            x=x,
            under=under,
            marks=[(cell, value) for cell, value in marks if 0 <= cell < cells],
            cursor=None if cursor_column is None or not 0 <= cursor_column < columns else cursor_column // 2,
            readout=None
            if cursor_column is None
            else self._readout(cursor_column, window, rank_line, under, x, columns, width),
            lr=self._learning_rates(x, cells),
            joints=[x.column(each.until, cells) for each in self.earlier if each.until and x.name == "step"],
        )
        return draw_curve(curve, width, height)

    def _window(self, series: Series, x: XAxis, columns: int) -> Window:
        fine = columns if x.name == "step" else FINE * columns
        span = x.first_step, x.last_step
        return on_axis(series.smoothed_window(self.metric, fine, span=span, over=self.smoothing), x, columns)

    def _below(self, earlier: EarlierCurve, x: XAxis, columns: int) -> list[float]:
        """Return the medians of an earlier run in the columns of this chart; NaN in columns without a value."""
        series = earlier.series
        if x.name == "step":
            window = self._window(series, x, columns)
            if earlier.until is None:
                return window.median
            end = x.column(earlier.until, columns)
            return [value if column < end else nan for column, value in enumerate(window.median)]
        first, last = series.span()
        if earlier.until is not None or not last:
            return [nan] * columns  # a resumed run's time, samples and tokens precede this run's by an unknown distance
        # The other run took other times (samples, tokens) for its steps: resample it within the ends of this axis.
        count = FINE * columns
        window = series.smoothed_window(self.metric, count, span=(first, last), over=self.smoothing)
        places = [
            series.axis.at(x.name, first + (index + 0.5) * (last - first + 1) / count - 0.5) for index in range(count)
        ]
        kept = [pair for pair in zip(places, window.median, strict=True) if x.begin <= pair[0] <= x.end]
        points = CurvePoints(at=[place for place, _ in kept], values=[value for _, value in kept])
        return resampled(points, columns, x.end, first=x.begin)

    def _validations(self, x: XAxis) -> list[Validation]:
        """Return the validations of the training's own weights (no average) within the range of the axis."""
        if self.metric != "loss":
            return []
        found = (each for each in self.live.state.validations if each.split == "valid" and each.weights_step is None)
        return [each for each in found if x.first_step <= each.step <= x.last_step and isfinite(each.loss)]

    def _learning_rates(self, x: XAxis, cells: int) -> list[float]:
        """Return the learning rate per cell; empty if it is constant."""
        if self.metric != "loss":
            return []
        rates = [self.live.series.axis.lr_at(x.step_at(cell, cells)) for cell in range(cells)]
        known = {rate for rate in rates if isfinite(rate)}
        return rates if len(known) > 1 else []

    def _readout(
        self,
        cursor_column: int,
        window: Window,
        rank_line: Sequence[float],
        under: Sequence[Sequence[float]],
        x: XAxis,
        columns: int,
        width: int,
    ) -> Row:
        """Return the values at the cursor, as the title line."""
        cursor = self.view.cursor
        assert cursor is not None
        row: Row = [(self.title_text, "title"), (f"  step {cursor:,}", "accent")]
        if x.name != "step":
            position = x.at(cursor)
            text = duration(position) if x.name == "time" else f"{format_short(position, 8).strip()} {x.name}"
            row.append((f"  {text}", "dim"))
        if 0 <= cursor_column < columns:
            low, middle, high = window.low[cursor_column], window.median[cursor_column], window.high[cursor_column]
            row += [("  ", "base"), (format_value(middle), "bright")]
            if self.live.series.world_size > 1:
                row.append((f" in {format_value(low)}–{format_value(high)}", "dim"))
            if self.selected_rank is not None and cursor_column < len(rank_line):
                row += [(f"  rank {self.selected_rank} ", "dim"), (format_value(rank_line[cursor_column]), "accent")]
            for each, line in zip(self.earlier, under, strict=True):
                row += [(f"  {each.name} ", "dim"), (format_value(line[cursor_column]), "under")]
        validations = self._validations(x)
        if validations:
            nearest = min(validations, key=lambda each: abs(each.step - cursor))
            row += [("  ◆ ", "good"), (f"{loss_text(nearest.loss)} at {nearest.step:,}", "dim")]
        rate = self.live.series.axis.lr_at(cursor)
        if self.metric == "loss" and isfinite(rate):
            row.append((f"  lr {rate:.3g}", "dim"))
        return fit_row(row, width)

    # Mouse

    def is_text_at(self, y: int) -> bool:
        """Return whether a line is the title, whose text can be selected; below it the mouse chooses steps."""
        return y == 0

    def _step_under(self, event: MouseEvent) -> int | None:
        """Return the step under the pointer; None outside the plot."""
        x, cells = self.x_axis(), self.columns // 2
        cell = event.x - LABEL_CELLS - 2
        return x.step_at(cell, cells) if 0 <= cell < cells and x.last_step and event.y > 0 else None

    def on_mouse_down(self, event: MouseDown) -> None:
        """Begin a range."""
        self._pressed = self._step_under(event) if event.button == 1 else None

    def on_mouse_up(self, event: MouseUp) -> None:
        """Report the step that was clicked, or the range that was dragged over."""
        pressed, self._pressed = self._pressed, None
        released = self._step_under(event)
        if pressed is not None and released is not None:
            self.post_message(ChartDragged(pressed) if released == pressed else ChartDragged(pressed, released))

    def _newest(self) -> float | None:
        """Return the figure of the run, as in the header: the newest loss, or a mean over the last steps."""
        figures = self.live.state.figures
        return {"loss": figures.loss, "step_ms": figures.step_ms, "sync_exposed_ms": figures.sync_ms}[self.metric]

    def _newest_of(self, rank: int) -> float | None:
        """Return the figure of a rank, as in its line of the table."""
        view = self.live.state.ranks.get(rank)
        if view is None:
            return None
        sums = view.sums
        return {"loss": view.loss, "step_ms": sums.mean_step_ms, "sync_exposed_ms": sums.mean_exposed_ms}[self.metric]
