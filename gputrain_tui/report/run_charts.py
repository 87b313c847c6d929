"""What the charts of a run's page show: the console's curves, in columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isfinite, nan

import msgspec

from gputrain_tui.history.hardware_series import HardwareSeries
from gputrain_tui.history.metric_curves import MetricCurves
from gputrain_tui.history.series import BAND_METRICS, Metric, Series
from gputrain_tui.report.report_fields import StepPart
from gputrain_tui.report.run_report import step_parts
from gputrain_tui.report.step_blocks import MIN_BLOCKS, StepBlocks
from gputrain_tui.state.figures import samples_per_s
from gputrain_tui.state.totals import Totals

COLUMNS = 600
"""Columns of a curve over the whole run: more than a page has pixels for each."""
MAX_RANKS = 16
"""Ranks that have lines of their own: of more, the lateness map shows all."""
MAX_CELLS = 60_000
"""Cells of the lateness map: 1,024 ranks have 58 columns."""
HARDWARE_COLUMNS, MAX_HARDWARE_VALUES = 240, 60_000
"""Columns of a hardware line, and values of all of them: the 3,328 lines of 1,024 GPUs on 128 hosts have 18 columns."""
MAX_METRICS, METRIC_COLUMNS = 64, 240
"""The user's own metrics that have a curve, and its columns: together a few hundred kilobytes."""
Values = tuple[float | None, ...]


class StepCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over the steps, in columns; ``low``, ``middle`` and ``high`` are the band over the ranks."""

    name: str
    unit: str
    middle: Values
    low: Values
    high: Values
    ranks: dict[int, Values] = {}
    """Lines of single ranks, where there are few."""


class BlockParts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean step of some consecutive steps."""

    first_step: int
    last_step: int
    parts: tuple[StepPart, ...] = ()
    samples_per_s: float | None = None


class LatenessCells(msgspec.Struct, frozen=True, kw_only=True):
    """How much later each rank was ready to synchronise than the first one, ms, in columns of equal steps."""

    ranks: tuple[int, ...]
    columns: tuple[Values, ...]
    """A column for each part of the steps, with a value for each rank."""


class HardwareLine(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity of a host or GPU over the time of the run, in columns of equal times."""

    host: str
    gpu: int | None
    quantity: str
    limit: float | None
    values: Values


class RunCharts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the charts of one run show."""

    first_step: int
    last_step: int
    curves: tuple[StepCurve, ...] = ()
    blocks: tuple[BlockParts, ...] = ()
    lateness: LatenessCells | None = None
    begin: float | None = None
    """Time of the first hardware sample, Unix seconds."""
    end: float | None = None
    hardware: tuple[HardwareLine, ...] = ()

    metrics: tuple[StepCurve, ...] = ()
    """The user's own."""


UNITS: dict[Metric, str] = {"loss": "", "step_ms": "ms", "sync_exposed_ms": "ms"}


def run_charts(
    series: Series,
    hardware: HardwareSeries,
    blocks: StepBlocks,
    metrics: MetricCurves,
    *,
    loss_unit: str = "",
    columns: int = COLUMNS,
) -> RunCharts:
    """Return the charts of a run; none of a run without a step but the hardware's."""
    first, last = series.span()
    columns = max(1, min(columns, last - first + 1)) if last else 0
    sampled = list(hardware.series())
    hardware_columns = max(1, min(columns or COLUMNS, HARDWARE_COLUMNS, MAX_HARDWARE_VALUES // max(len(sampled), 1)))
    lines = [
        HardwareLine(
            host=hardware.hosts[key.machine],
            gpu=None if key.gpu < 0 else key.gpu,
            quantity=key.quantity,
            limit=each.limit,
            values=_rounded(each.columns(hardware.begin, hardware.end, hardware_columns)),
        )
        for key, each in sampled
    ]
    charts = RunCharts(
        first_step=first, last_step=last, begin=_known(hardware.begin), end=_known(hardware.end), hardware=tuple(lines)
    )
    if not last:
        return charts
    units = UNITS | {"loss": loss_unit}
    return msgspec.structs.replace(
        charts,
        curves=tuple(_curve(series, name, units[name], columns) for name in BAND_METRICS),
        blocks=tuple(_parts_of(first, last, tuple(sums)) for first, last, sums in blocks.numbered()),
        lateness=_lateness(series, first, last, columns),
        metrics=tuple(_metric(metrics, name, (first, last), columns) for name in metrics.names[:MAX_METRICS]),
    )


def _curve(series: Series, name: Metric, unit: str, columns: int) -> StepCurve:
    window = series.window(name, columns)
    few = series.world_size <= MAX_RANKS
    return StepCurve(
        name=name,
        unit=unit,
        middle=_rounded(window.middle),
        low=_rounded(window.low),
        high=_rounded(window.high),
        ranks={
            rank: _rounded(series.window(name, columns, rank=rank).middle)
            for rank in range(series.world_size if few and series.world_size > 1 else 0)
        },
    )


def _metric(metrics: MetricCurves, name: str, span: tuple[int, int], columns: int) -> StepCurve:
    window = metrics[name].window(min(columns, METRIC_COLUMNS), span)
    low, middle, high = (_rounded(values) for values in (window.low, window.middle, window.high))
    return StepCurve(name=name, unit="", middle=middle, low=low, high=high)


@lru_cache(maxsize=4 * MIN_BLOCKS)  # of a page that is drawn again and again, one block has changed
def _parts_of(first: int, last: int, sums: tuple[Totals, ...]) -> BlockParts:
    return BlockParts(first_step=first, last_step=last, parts=step_parts(sums), samples_per_s=samples_per_s(sums))


def _lateness(series: Series, first: int, last: int, columns: int) -> LatenessCells | None:
    """Return the mean lateness in each column; None where ranks do not wait for each other."""
    ranks = series.world_size
    if ranks < 2:
        return None
    columns = max(1, min(columns, MAX_CELLS // ranks))
    sums = [[0.0] * ranks for _ in range(columns)]
    counts = [0] * columns
    for frame in series.frames(first, last, 4 * columns):
        values = frame.values[3]
        if values is None:
            continue
        column = min((max(frame.last_step, first) - first) * columns // (last - first + 1), columns - 1)
        counts[column] += 1
        for rank in range(min(ranks, len(values))):
            sums[column][rank] += values[rank]
    if not any(counts):
        return None
    cells = [
        _rounded([total / count for total in row] if count else [nan] * ranks)
        for row, count in zip(sums, counts, strict=True)
    ]
    return LatenessCells(ranks=tuple(range(ranks)), columns=tuple(cells))


def _rounded(values: Sequence[float]) -> Values:
    """Return the values with five digits, which is more than a chart shows; None for gaps."""
    return tuple(float(f"{value:.5g}") if isfinite(value) else None for value in values)


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
