"""Chart of a metric of the followed run: line and band, curves of earlier runs, a cursor and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import TYPE_CHECKING

from textual.events import MouseDown, MouseEvent, MouseUp
from textual.message import Message

from gputrain_tui.console.widgets.chart_view import FINE, LABEL_CELLS, ChartView, XAxis, line_on_axis, on_axis
from gputrain_tui.console.widgets.curve_drawing import Curve, Scale, chart_columns, draw_curve
from gputrain_tui.console.widgets.drawing import Row, format_short, format_value
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.comparison import CurvePoints, resampled
from gputrain_tui.history.series import BandMetric, Series, Window, smooth_window
from gputrain_tui.tables import duration, printable
from trainer.contract.record import Validation

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun


TITLES: dict[BandMetric, tuple[str, str]] = {
    "loss": ("loss", "no step yet"),
    "sync_exposed_ms": ("sync wait ms", "no gradient synchronisation was measured yet"),
    "step_ms": ("step ms", "no step was measured yet"),
}
"""Title and text before the first measurement of each metric's chart."""


@dataclass
class ChartDragged(Message):
    """The mouse was clicked at ``step`` of a chart, or dragged from there to ``until``."""

    step: int
    until: int | None = None


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
        self, live: LiveRun, metric: BandMetric, *, view: ChartView | None = None, id: str | None = None
    ) -> None:
        super().__init__(live, id=id)
        self.metric: BandMetric = metric
        self.view = view or ChartView()
        """Range, axis and cursor, shared by the charts of a screen."""
        self.earlier: Sequence[EarlierCurve] = ()
        self.own_metric: str | None = None
        """Name of one of the user's own metrics, which the chart shows instead of ``metric``."""
        self.chart_scale: Scale = "linear"
        self.last: int | None = None
        """Steps to show; None: the whole run."""
        self.smoothing = 0
        self._pressed: int | None = None

    def show(self, *, scale: Scale | None = None, last: int | None = None, smoothing: int | None = None) -> None:
        """Set the options of the chart; None leaves one as it is, except ``last``, where None is the whole run."""
        self.chart_scale = scale or self.chart_scale
        self.last = last
        self.smoothing = self.smoothing if smoothing is None else smoothing
        self.redraw()

    def seen_version(self) -> object:
        if self.own_metric is not None:
            return self.live.metrics.version, self.live.series.version
        validations = len(self.live.state.validations) if self.metric == "loss" else 0
        return self.live.series.version, validations, [each.series.version for each in self.earlier]

    @property
    def default_span(self) -> tuple[int, int]:
        """First and last step to show without a range; the steps of runs that were resumed are included."""
        first, last = self.live.series.span(self.last)
        if self.last is None and self.view.axis == "step":
            begins = [each.series.first_step for each in self.earlier if each.until and each.series.first_step]
            first = min([first, *begins])
        return first, last

    @property
    def columns(self) -> int:
        return chart_columns(self.size.width)

    def x_axis(self) -> XAxis:
        first, last = self.view.span or self.default_span
        axis = self.live.series.axis
        name = self.view.axis if axis.has(self.view.axis) else "step"
        return XAxis(name=name, first_step=first, last_step=last, at=partial(axis.at, name))

    def draw(self, width: int, height: int) -> list[Row]:
        if self.own_metric is not None and self.own_metric in self.live.metrics.names:
            return self._draw_own(self.own_metric, width, height)
        series, x, columns = self.live.series, self.x_axis(), chart_columns(width)
        window = self._window(series, x, columns)
        rank = self.selected_rank
        rank_line: list[float] = []
        if rank is not None:
            fine = columns if x.name == "step" else FINE * columns
            span = x.first_step, x.last_step
            rank_line = series.smoothed_window(self.metric, fine, rank=rank, span=span, over=self.smoothing).middle
            rank_line = rank_line if x.name == "step" else line_on_axis(rank_line, x, columns)
        under = [self._below(each, x, columns) for each in self.earlier]
        notes = [f"smooth over {self.smoothing:,} steps"] if self.smoothing else []  # first: it is kept
        notes += [f"┈ {each.name}" for each in self.earlier]
        notes += [] if self.metric == "loss" else [f"mean of the {self.live.state.span}"]
        notes += [] if self.last is None or self.view.span else [f"last {self.last:,}"]
        notes += [f"steps {x.first_step:,}–{x.last_step:,}"] if self.view.span else []
        cells = columns // 2
        cursor = None if self.view.cursor is None else x.column(self.view.cursor, columns)
        readout = None if cursor is None else self._readout(cursor, window, rank_line, under, x, columns)
        validations = [(x.column(each.step, cells), each.loss) for each in self._validations(x)]
        title, empty = TITLES[self.metric]
        curve = Curve(
            title=title,
            unit=self.live.state.loss_unit if self.metric == "loss" else "",
            is_loss=self.metric == "loss",
            window=window,
            value=self._newest(),
            ranks=series.world_size,
            rank=rank,
            rank_line=rank_line,
            rank_value=None if rank is None else self._newest(rank),
            scale=self.chart_scale,
            notes=tuple(notes),
            empty=empty,
            spiky=self.metric != "loss",
            blocks=self.ramp.shades,
            x=x,
            under=under,
            validations=[(cell, loss) for cell, loss in validations if 0 <= cell < cells],
            cursor=None if cursor is None or not 0 <= cursor < columns else cursor // 2,
            readout=readout,
            lr=self._learning_rates(x, cells),
            joints=[x.column(each.until, cells) for each in self.earlier if each.until and x.name == "step"],
        )
        return draw_curve(curve, width, height)

    def _draw_own(self, name: str, width: int, height: int) -> list[Row]:
        """Draw one of the user's own metrics: the mean and the band over the ranks that report it."""
        x, columns = self.x_axis(), chart_columns(width)
        fine = columns if x.name == "step" else FINE * columns
        window = smooth_window(self.live.metrics[name].window(fine, (x.first_step, x.last_step)), self.smoothing)
        window = on_axis(window, x, columns)
        notes = [f"steps {x.first_step:,}–{x.last_step:,}"] if self.view.span else []
        notes += [f"smooth over {self.smoothing:,} steps"] if self.smoothing else []
        cursor = None if self.view.cursor is None else x.column(self.view.cursor, columns)
        is_inside = cursor is not None and 0 <= cursor < columns
        readout: Row | None = None
        if cursor is not None:
            readout = [(printable(name), "title"), (f"  step {self.view.cursor:,}  ", "accent")]
            readout.append((format_value(window.middle[cursor]) if is_inside else "", "bright"))
        curve = Curve(
            title=printable(name),
            window=window,
            value=self.live.state.metrics.values().get(name),
            scale=self.chart_scale,
            notes=tuple(notes),
            blocks=self.ramp.shades,
            x=x,
            cursor=None if cursor is None or not is_inside else cursor // 2,
            readout=readout,
        )
        return draw_curve(curve, width, height)

    def _window(self, series: Series, x: XAxis, columns: int) -> Window:
        fine = columns if x.name == "step" else FINE * columns
        span = x.first_step, x.last_step
        return on_axis(series.smoothed_window(self.metric, fine, span=span, over=self.smoothing), x, columns)

    def _below(self, earlier: EarlierCurve, x: XAxis, columns: int) -> list[float]:
        """Return the line of an earlier run in the columns of this chart; NaN in columns without a value."""
        series = earlier.series
        if x.name == "step":
            window = self._window(series, x, columns)
            if earlier.until is None:
                return window.middle
            end = x.column(earlier.until, columns)
            return [value if column < end else nan for column, value in enumerate(window.middle)]
        first, last = series.span()
        if earlier.until is not None or not last:
            return [nan] * columns  # a resumed run's time, samples and tokens precede this run's by an unknown distance
        # The other run took other times (samples, tokens) for its steps: resample it within the ends of this axis.
        count = FINE * columns
        window = series.smoothed_window(self.metric, count, span=(first, last), over=self.smoothing)
        steps = [first + (index + 0.5) * (last - first + 1) / count - 0.5 for index in range(count)]
        positions = [series.axis.at(x.name, step) for step in steps]
        kept = [pair for pair in zip(positions, window.middle, strict=True) if x.begin <= pair[0] <= x.end]
        points = CurvePoints(at=[position for position, _ in kept], values=[value for _, value in kept])
        return resampled(points, columns, x.end, first=x.begin)

    def _validations(self, x: XAxis) -> list[Validation]:
        """Return the validations of the training's own weights (no average) within the range of the axis."""
        if self.metric != "loss":
            return []
        return [
            each
            for each in self.live.state.validations
            if each.split == "valid" and each.weights_step is None and x.first_step <= each.step <= x.last_step
            if isfinite(each.loss)
        ]

    def _learning_rates(self, x: XAxis, cells: int) -> list[float]:
        if self.metric != "loss":
            return []
        rates = [self.live.series.axis.lr_at(x.step_at(cell, cells)) for cell in range(cells)]
        known = {rate for rate in rates if isfinite(rate)}
        return rates if len(known) > 1 else []

    def _readout(
        self,
        column: int,
        window: Window,
        rank_line: Sequence[float],
        under: Sequence[Sequence[float]],
        x: XAxis,
        columns: int,
    ) -> Row:
        """Return the values at the cursor, as the title line."""
        cursor = self.view.cursor
        assert cursor is not None
        row: Row = [(TITLES[self.metric][0], "title"), (f"  step {cursor:,}", "accent")]
        if x.name != "step":
            position = x.at(cursor)
            text = duration(position) if x.name == "time" else f"{format_short(position, 8).strip()} {x.name}"
            row.append((f"  {text}", "dim"))
        if 0 <= column < columns:
            low, middle, high = (line[column] for line in (window.low, window.middle, window.high))
            row += [("  ", "base"), (format_value(middle), "bright")]
            if self.live.series.world_size > 1:
                row.append((f" in {format_value(low)}–{format_value(high)}", "dim"))
            if self.selected_rank is not None and column < len(rank_line):
                row += [(f"  rank {self.selected_rank} ", "dim"), (format_value(rank_line[column]), "accent")]
            for each, line in zip(self.earlier, under, strict=True):
                row += [(f"  {each.name} ", "dim"), (format_value(line[column]), "under")]
        validations = self._validations(x)
        if validations:
            nearest = min(validations, key=lambda each: abs(each.step - cursor))
            row += [("  ◆ ", "good"), (f"{loss_text(nearest.loss)} at {nearest.step:,}", "dim")]
        rate = self.live.series.axis.lr_at(cursor)
        if self.metric == "loss" and isfinite(rate):
            row.append((f"  lr {rate:.3g}", "dim"))
        return row

    # Mouse

    def is_text_at(self, y: int) -> bool:
        """Return whether a line is the title, whose text can be selected; below it the mouse chooses steps."""
        return y == 0

    def _step_under(self, event: MouseEvent) -> int | None:
        x, cells = self.x_axis(), self.columns // 2
        cell = event.x - LABEL_CELLS - 2
        return x.step_at(cell, cells) if 0 <= cell < cells and x.last_step and event.y > 0 else None

    def on_mouse_down(self, event: MouseDown) -> None:
        self._pressed = self._step_under(event) if event.button == 1 else None

    def on_mouse_up(self, event: MouseUp) -> None:
        pressed, self._pressed = self._pressed, None
        released = self._step_under(event)
        if pressed is not None and released is not None:
            self.post_message(ChartDragged(pressed) if released == pressed else ChartDragged(pressed, released))

    def _newest(self, rank: int | None = None) -> float | None:
        """Return the figure of the run, as in the header, or of a rank, as in its line of the table."""
        figures = self.live.state.figures
        values = figures.loss, figures.step_ms, figures.sync_ms
        if rank is not None:
            if (view := self.live.state.ranks.get(rank)) is None:
                return None
            values = view.loss, view.sums.mean_step_ms, view.sums.mean_exposed_ms
        return dict(zip(("loss", "step_ms", "sync_exposed_ms"), values, strict=True))[self.metric]
