"""Chart of loss, throughput or exposed synchronisation of one or several runs, read from their records.

The curves are numbered at their ends, so that the legend works without colours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from gputrain_tui.console.widgets.canvas import CURVES, Canvas, role_classes
from gputrain_tui.console.widgets.chart_view import LABEL_CELLS, position_labels
from gputrain_tui.console.widgets.curve_drawing import (
    BRAILLE,
    Axis,
    Scale,
    braille_line,
    chart_columns,
    gutter,
    plot_limits,
)
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, fit_rows, merge, pad, title_row
from gputrain_tui.headless.number_text import loss_text, number, percent
from gputrain_tui.history.comparison import CurveHistory, Measure, resampled
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.live_run import BACKLOG_PAUSE_S, POLL_BUDGET_S, PORTION_BYTES
from gputrain_tui.state.best_validation import BestValidation
from gputrain_tui.tables import duration, printable
from trainer.contract.record import AnyEvent


@dataclass(frozen=True, kw_only=True)
class OverlayLine:
    """Curve and figures of one run."""

    name: str
    values: Sequence[float]
    """A value per column, two columns per cell; NaN: none."""
    loss: float | None = None
    """Newest loss, nats; NaN where it is not a number, None before the first step."""
    valid: float | None = None
    """Loss of the newest validation, nats."""
    best: BestValidation | None = None
    rate: tuple[float | None, str] = (None, "samples/s")
    """Mean rate and its unit, ``samples/s`` or ``steps/s``."""
    sync_share: float | None = None
    """Share of the step time spent waiting for the gradient synchronisation, 0 to 1."""


TITLES: dict[Measure, tuple[str, str]] = {
    "loss": ("loss", "mean of the ranks"),
    "samples_per_s": ("throughput", "samples/s of all ranks"),
    "steps_per_s": ("throughput", "steps/s"),
    "sync_exposed_ms": ("sync wait", "ms"),
}


def draw_overlay(
    lines: Sequence[OverlayLine],
    width: int,
    height: int,
    *,
    last: float,
    first: float = 0.0,
    over_time: bool = False,
    measure: Measure = "loss",
    own_metric: str | None = None,
    scale: Scale = "linear",
    notes: Sequence[str] = (),
) -> list[Row]:
    """Return the chart as ``height`` rows of ``width`` cells; the axis is from ``first`` to ``last`` step or second."""
    title, measured_in = TITLES[measure] if own_metric is None else (printable(own_metric), "mean of the ranks")
    unit = "time since the start" if over_time else "steps"
    left: Row = [(title, "title"), (f"  {measured_in} over {unit}", "dim")]
    rights: list[Row] = [[(note, "dim")] for note in (*notes, *(["log"] if scale == "log" else []))]
    rows = [title_row(width, left, rights)]
    plot_height, cells = height - 2, width - LABEL_CELLS - 2
    limits = plot_limits((line.values for line in lines), scale)
    if limits is None or plot_height < 2 or cells < 6:
        return rows + centred_text(width, height - 1, ["no step yet"])
    axis = Axis(*limits, plot_height, scale)
    labels = axis.labels(plot_height)
    drawn = [braille_line(line.values, axis, cells, plot_height) for line in lines]
    numbers = _numbers(drawn, cells) if len(drawn) > 1 else {}
    for y in range(plot_height):
        label = labels.get(y, "")
        pieces = gutter(label, "dim")
        ground = ("┈" if label else " ", "rule")
        for x in range(cells):
            # A cell has one colour: where curves meet, only the first one is drawn.
            curve = next((index for index, cells_of in enumerate(drawn) if cells_of[y][x]), None)
            piece = ground if curve is None else (chr(BRAILLE + drawn[curve][y][x]), f"curve-{curve}")
            pieces.append(numbers.get((x, y), piece))
        rows.append(merge(pieces))
    text = duration if over_time else "{:,.0f}".format
    newest = text(last) if over_time else f"step {last:,.0f}"
    rows.append([(position_labels(width, first, last, last, 16, text, newest), "dim")])
    return fit_rows(rows, width, height)


def _numbers(drawn: Sequence[Sequence[Sequence[int | None]]], cells: int) -> dict[tuple[int, int], tuple[str, str]]:
    """Return the number of each curve, with its role, by the cell at the curve's right end."""
    numbers: dict[tuple[int, int], tuple[str, str]] = {}
    for index, rows in enumerate(drawn):
        ends = [(x, y) for y, row in enumerate(rows) for x in range(cells) if row[x]]
        if not ends:
            continue
        x, y = max(ends)
        while (x, y) in numbers and x:
            x -= 1
        numbers[x, y] = (f"{index + 1}", f"curve-{index}")
    return numbers


def legend(lines: Sequence[OverlayLine], width: int) -> list[Row]:
    """Return a line per run: number, colour, name, newest loss and validation loss; in wide panels more."""
    wide_legend_cells = 110  # fewest cells of a legend with throughput, synchronisation and the best validation
    is_wide = width >= wide_legend_cells
    bests = [_best_text(line.best) if is_wide else "" for line in lines]
    best_cells = max(map(len, bests), default=0)
    names = max(width - 7 - 2 * 14 - (36 if is_wide else 0) - best_cells, 8)
    rows = []
    for index, (line, best) in enumerate(zip(lines, bests, strict=True)):
        row: Row = [
            (f" {index + 1} ━━ ", f"curve-{index}"),
            (pad(printable(line.name), names), "bright"),
            ("  loss", "dim"),
            (loss_text(line.loss).rjust(8), "bright"),
            (" valid", "dim"),
            (loss_text(line.valid).rjust(8), "bright"),
        ]
        if is_wide:
            value, unit = line.rate
            waited = percent(line.sync_share).rjust(8)
            row += [(best.ljust(best_cells), "dim"), (unit.rjust(11), "dim"), (number(value).rjust(10), "bright")]
            row += [("  sync", "dim"), (waited, "bright")]
        rows.append(fit_row(row, width))
    return rows


def _best_text(best: BestValidation | None) -> str:
    """Return the best validation with its metric, such as `` best accuracy 0.9120``; empty without one."""
    if best is None:
        return ""
    metric = "" if best.metric == "loss" else f"{printable(best.metric)} "
    return f" best {metric}{best.value:.4f}"


class CurveReader:
    """Reader of one run's curves, in portions."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = CurveHistory(run.status.recorded_ranks)
        self.behind = True
        self._reader = RunReader(run.dir)
        self._unapplied: deque[AnyEvent] = deque()
        """Events that are read: a portion of fast steps, many in an event, takes many times the budget to apply."""

    def poll(self, deadline: float) -> bool:
        """Read appended events until about ``deadline`` (of ``perf_counter``); return whether anything changed."""
        if not self.behind and self.run.state in ENDED:
            return False  # the record is complete
        was_behind = self.behind
        has_events = False
        while True:
            if not self._unapplied:
                self._unapplied.extend(self._reader.poll(PORTION_BYTES))
            while self._unapplied:
                self.history.apply(self._unapplied.popleft())
                has_events = True
                if perf_counter() >= deadline:
                    break
            self.behind = bool(self._unapplied) or self._reader.backlog_bytes > 0
            if not self.behind or perf_counter() >= deadline:
                return has_events or was_behind != self.behind

    def close(self) -> None:
        self._reader.close()


class OverlayChart(Canvas):
    """Chart of several runs' curves."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes(*CURVES)

    over_time = False
    measure: Measure = "loss"
    own_metric: str | None = None
    """One of the user's own that is drawn in place of the measure."""
    scale: Scale = "linear"
    smoothing = 0
    _readers: Sequence[CurveReader] = ()
    _reading_on = False

    def __init__(self, *, named: bool = True, id: str | None = None) -> None:
        super().__init__(id=id)
        self._named = named

    @property
    def runs(self) -> list[Run]:
        return [reader.run for reader in self._readers]

    @property
    def metric_names(self) -> list[str]:
        """The user's own metrics of all runs, in the order in which they appeared."""
        return list(dict.fromkeys(name for reader in self._readers for name in reader.history.metrics.names))

    def show(self, runs: Sequence[Run]) -> None:
        self.on_unmount()
        self._readers = [CurveReader(run) for run in runs]
        self.redraw()

    def on_unmount(self) -> None:
        for reader in self._readers:
            reader.close()

    def tick(self) -> None:
        """Read appended events within the budget and redraw; with a backlog, go on after a short pause."""
        if not self.display:
            return
        deadline = perf_counter() + POLL_BUDGET_S
        changed = [reader.poll(deadline) for reader in self._readers]
        if any(changed):
            self.redraw()
        if any(reader.behind for reader in self._readers) and not self._reading_on:
            self._reading_on = True
            self.set_timer(BACKLOG_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        self._reading_on = False
        if self.screen.is_current:
            self.tick()

    def draw(self, width: int, height: int) -> list[Row]:
        columns = chart_columns(width)
        histories = [reader.history for reader in self._readers]
        last = max((h.last_second if self.over_time else float(h.last_step) for h in histories), default=0.0)
        first = float(min((h.first_step for h in histories if h.first_step), default=0))
        late_start_share = 0.1  # share of the axis beyond which it begins at the first step of resumed runs, not at 0
        if self.over_time or first <= late_start_share * last:
            first = 0.0
        measure, rates = self.measure, [history.rates for history in histories]
        if measure == "samples_per_s" and not any(each.samples_per_s for each in rates):
            measure = "steps_per_s"
        lines = []
        for reader, history in zip(self._readers, histories, strict=True):
            points = history.points(
                columns, over_time=self.over_time, smoothing=self.smoothing, measure=measure, own_metric=self.own_metric
            )
            newest = history.validations.newest()
            lines.append(
                OverlayLine(
                    name=reader.run.id,
                    values=resampled(points, columns, last, first=first),
                    loss=history.loss,
                    valid=None if newest is None else newest.loss,
                    best=history.validations.best,
                    rate=history.rates.rate,
                    sync_share=history.sync_share,
                )
            )
        notes = [f"smooth over {self.smoothing:,} steps"] if self.smoothing else []
        notes += ["reading"] if any(reader.behind for reader in self._readers) else []
        names = legend(lines, width) if self._named else []
        gap: list[Row] = [[]] if names and height >= 20 else []
        chart = draw_overlay(
            lines, width, height - len(names) - len(gap), first=first, last=last, over_time=self.over_time,
            measure=measure, own_metric=self.own_metric, scale=self.scale, notes=notes,
        )  # fmt: skip
        return chart + names + gap
