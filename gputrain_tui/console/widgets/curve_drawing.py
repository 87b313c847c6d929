"""Chart of a metric over the steps: a middle line on the band from minimum to maximum over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, isfinite, log10, nan
from typing import Literal

from gputrain_tui.console.widgets.chart_view import LABEL_CELLS, XAxis
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    LOWER,
    Row,
    bar_below,
    centred_text,
    fit_row,
    fit_rows,
    format_short,
    format_value,
    merge,
    nice_step,
    title_row,
)
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.series import Window

Scale = Literal["linear", "log"]

BRAILLE = 0x2800
BRAILLE_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell, per dot column from the top."""
GREATEST, LEAST = 1e300, 1e-300
"""Limits of a drawn number's absolute value, so that differences and quotients stay finite."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Data and options of a chart."""

    title: str
    unit: str = ""
    is_loss: bool = False
    """Whether the values are losses, which ``loss_text`` formats."""
    window: Window
    """Median and band, two columns per cell."""
    value: float | None = None
    """Figure of the run, shown in the title."""
    ranks: int = 0
    rank: int | None = None
    rank_line: Sequence[float] = ()
    rank_value: float | None = None
    scale: Scale = "linear"
    notes: tuple[str, ...] = ()
    """Options in force, shown in the title, such as ``last 1,000``."""
    empty: str = "no step yet"
    spiky: bool = False
    """Whether rare spikes may be cropped."""
    blocks: bool = True
    """Whether the band is drawn as filled cells; otherwise as dots, for terminals with few colours."""
    x: XAxis | None = None
    """Horizontal axis; None: the steps of the window."""
    under: Sequence[Sequence[float]] = ()
    """Curves of earlier runs, drawn below, in the columns of the window."""
    validations: Sequence[tuple[int, float]] = ()
    """Cell and value of each."""
    cursor: int | None = None
    readout: Row | None = None
    """Values at the cursor, shown instead of the title."""
    joints: Sequence[int] = ()
    """Cells of the steps at which a run was resumed."""
    lr: Sequence[float] = ()
    """Learning rate per cell, drawn as a strip below the curve if there are ten lines."""


def chart_columns(width: int) -> int:
    """Return the number of columns of a curve in a chart ``width`` cells wide."""
    return 2 * max(width - LABEL_CELLS - 2, 1)


def draw_curve(curve: Curve, width: int, height: int) -> list[Row]:
    """Return a chart as ``height`` rows of ``width`` cells."""
    with_lr = height >= 10 and any(map(isfinite, curve.lr))
    plot_height = height - (2 if height > 4 else 1) - with_lr
    if plot_height < 1:
        return [fit_row(_head(curve, width), width)]
    window, cells = curve.window, width - LABEL_CELLS - 2
    validations = [value for _, value in curve.validations]
    limits = plot_limits((window.low, window.high, curve.rank_line, *curve.under, validations), curve.scale)
    if limits is None or cells < 4:
        text = curve.empty if limits is None else EMPTY
        return [fit_row(_head(curve, width), width), *centred_text(width, height - 1, [text])]
    low, high = limits
    axis = Axis(low, min(high, _usual_top(curve, low)), plot_height, curve.scale)
    rows = [_head(curve, width, peak=high if axis.leaves_out(high) else None), *_plot(curve, axis, cells, plot_height)]
    if with_lr:
        top = max(filter(isfinite, curve.lr))
        bars = "".join(bar_below(rate, top) for rate in curve.lr[:cells])
        rows.append([("lr".rjust(LABEL_CELLS), "axis"), (" │", "rule"), (bars, "dim")])
    if height > 4:
        x = curve.x or XAxis(first_step=window.first_step, last_step=window.last_step)
        rows.append(x.labels(width))
    return fit_rows(rows, width, height)


def _head(curve: Curve, width: int, *, peak: float | None = None) -> Row:
    if curve.readout is not None:
        return curve.readout
    left: Row = [(curve.title, "title"), (" ", "base"), (_value_text(curve, curve.value), "bright")]
    mean_from_cells = 70  # fewest cells of a chart whose title has the word ``mean`` after the newest loss
    mean = "mean" if curve.is_loss and curve.ranks > 1 and width >= mean_from_cells else ""
    left += [(f" {word}", "dim") for word in (curve.unit, mean) if word]
    if curve.rank is not None:
        left += [("  rank ", "dim"), (f"{curve.rank} {_value_text(curve, curve.rank_value)}", "accent")]
    notes = [*(["log"] if curve.scale == "log" else []), *curve.notes]
    if curve.ranks > 1:
        middle = "mean" if curve.is_loss else "median"
        notes.append(f"{middle} in min–max of {curve.ranks:,} ranks")
    peaks: list[Row] = [] if peak is None else [[("▴", "middle"), (f" spikes up to {format_value(peak)}", "dim")]]
    return title_row(width, left, [*peaks, *([(note, "dim")] for note in notes)])


def _value_text(curve: Curve, value: float | None) -> str:
    """Return a value as text; a loss as in header and table."""
    return loss_text(value) if curve.is_loss else format_value(value)


def plot_limits(lines: Iterable[Sequence[float]], scale: Scale) -> tuple[float, float] | None:
    """Return the least and greatest number to show; None if no value can be drawn."""
    least = 0.0 if scale == "log" else -inf
    values = [value for line in lines for value in line if least < value < inf]
    if not values:
        return None
    low, high = (min(max(value, -GREATEST), GREATEST) for value in (min(values), max(values)))
    return (max(low, LEAST), max(high, LEAST)) if scale == "log" else (low, high)


def _usual_top(curve: Curve, low: float) -> float:
    """Return the top of the axis that crops rare spikes; infinite if there are none."""
    highs = sorted(value for value in curve.window.high if isfinite(value))
    newest_columns = 8  # newest columns that are never cropped: a new level is no spike
    if not curve.spiky or curve.scale == "log" or len(highs) < 2 * newest_columns:
        return inf
    newest = [v for line in (curve.window.middle, curve.rank_line) for v in line[-newest_columns:] if isfinite(v)]
    usual_share = 0.95  # share of the columns that fit below the top if spikes are cropped
    top = max([highs[int(usual_share * (len(highs) - 1))], *newest])
    # Ratio of the greatest to the usual height from which spikes are cropped; below it, both can be read.
    spike_ratio = 2.5
    return top + 0.2 * (top - low) if highs[-1] - low > spike_ratio * (top - low) > 0 else inf


class Axis:
    """Vertical axis: heights from 0 to 1 of values, and ticks."""

    def __init__(self, low: float, high: float, height: int, scale: Scale) -> None:
        self.log = scale == "log"
        self.ticks: list[float] = []
        most = max(2, height // 3)
        if self.log:
            self.low, self.high = log10(low), log10(high)
            if self.high - self.low < 0.1:
                self.low, self.high = self.low - 0.05, self.high + 0.05
            decades = range(floor(self.low), ceil(self.high) + 1)
            for factors in ((1, 2, 5), (1, 3), (1,)):
                ticks = [f * 10.0**d for d in decades for f in factors if self.low <= log10(f) + d <= self.high]
                if len(ticks) <= most:
                    break
            if len(ticks) < 2:  # less than a decade: use evenly spaced ticks
                low, high = 10**self.low, 10**self.high
                step = nice_step(high - low, most)
                ticks = [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
            self.ticks = ticks[:: max(1, ceil(len(ticks) / most))]
            return
        if high - low <= max(1e-9 * max(abs(low), abs(high)), LEAST):  # a constant stands in the middle
            pad = abs(high) * 0.1 if abs(high) > LEAST else 1.0
            low, high = low - pad, high + pad
        step = nice_step(high - low, most)
        half = step / 2
        self.low, self.high = floor(low / half + 1e-9) * half, ceil(high / half - 1e-9) * half
        self.ticks = [n * step for n in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)]

    def leaves_out(self, value: float) -> bool:
        """Return whether a value is above the top of the axis."""
        return not self.log and value > self.high + 1e-9 * abs(self.high)

    def at(self, value: float) -> float:
        """Return the height of a value, 0 to 1; NaN if it cannot be drawn."""
        if self.log:
            value = log10(value) if value > 0 else nan
        elif not isfinite(value):
            return nan
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def labels(self, height: int) -> dict[int, str]:
        """Return the labels of the ticks by their lines from the top."""
        labels: dict[int, str] = {}
        for tick in reversed(self.ticks):
            line = min(height - 1, int((1 - self.at(tick)) * height))
            labels.setdefault(line, format_short(round(tick, 12)).strip())
        return labels


def gutter(label: str, role: str = "axis") -> Row:
    """Return the y label of a line of a plot, and its piece of the axis."""
    return [(label.rjust(LABEL_CELLS), role), (" ┤" if label else " │", "rule")]


def _plot(curve: Curve, axis: Axis, width: int, height: int) -> list[Row]:
    """Return the rows of the plot with their y labels."""
    middle = braille_line(curve.window.middle, axis, width, height)
    rank = braille_line(curve.rank_line, axis, width, height)
    bottoms, tops = _edges(curve.window, axis, width, height)
    under = [braille_line(line, axis, width, height) for line in curve.under]
    validations = {
        (cell, min(height - 1, int((1 - share) * height)))
        for cell, value in curve.validations
        if (share := axis.at(value)) == share
    }
    highs = enumerate(curve.window.high)
    spikes = {column >> 1 for column, value in highs if value < inf and axis.leaves_out(min(value, GREATEST))}
    labels = axis.labels(height)
    rows = []
    for y in range(height):
        label = labels.get(y, "")
        pieces = gutter(label)
        ground = "┈" if label else " "
        floor_8 = 8 * (height - 1 - y)
        rank_row, middle_row = rank[y], middle[y]
        for x in range(width):
            low, high = max(bottoms[x] - floor_8, 0), min(tops[x] - floor_8, 8)
            behind = next((line[y][x] for line in under if line[y][x]), 0)
            if (x, y) in validations:
                pieces.append(("◆", "good"))
            elif y == 0 and x in spikes:
                pieces.append(("▴", "middle"))
            elif rank_row[x] or middle_row[x]:
                is_rank = rank_row[x] and not (middle_row[x] and x % 2)  # cells of both curves alternate between them
                role, bits = ("rank", rank_row[x]) if is_rank else ("middle", middle_row[x])
                on_band = curve.blocks and high - low >= 4
                pieces.append((chr(BRAILLE + bits), f"{role}-on-band" if on_band else role))
            elif x == curve.cursor:
                pieces.append(("│", "accent"))
            elif x in curve.joints:
                pieces.append(("┊", "accent"))
            elif behind and high - low < 4:
                pieces.append((chr(BRAILLE + behind), "under"))
            elif high <= low:
                pieces.append((ground, "rule"))
            elif not curve.blocks:
                pieces.append((_dots(low, high, sparse=True), "band"))
            elif low == 0:
                pieces.append((LOWER[high], "band"))
            elif high == 8:
                pieces.append((LOWER[low], "band-reversed"))
            else:
                pieces.append((_dots(low, high), "band"))
        rows.append(merge(pieces))
    return rows


def braille_line(values: Sequence[float], axis: Axis, width: int, height: int) -> list[bytearray]:
    """Return a connected curve as bits of braille cells, [height, width]."""
    cells = [bytearray(width) for _ in range(height)]
    dots = 4 * height
    before = -1
    for column, value in enumerate(values[: 2 * width]):
        share = axis.at(value)
        if share != share:
            before = -1
            continue
        y = min(dots - 1, int((1 - share) * dots))
        bits = BRAILLE_DOTS[column & 1]
        x = column >> 1
        cells[y >> 2][x] |= bits[y & 3]
        if before >= 0 and abs(before - y) > 1:
            for between in range(before + 1, y) if before < y else range(y + 1, before):
                cells[between >> 2][x] |= bits[between & 3]
        before = y
    return cells


def _edges(window: Window, axis: Axis, width: int, height: int) -> tuple[list[int], list[int]]:
    """Return the lower and upper edge of the band per cell, in eighths of a cell from the bottom."""
    eighths = 8 * height
    bottoms, tops = [0] * width, [0] * width
    for x in range(width):
        lows = [share for value in window.low[2 * x : 2 * x + 2] if (share := axis.at(value)) == share]
        highs = [share for value in window.high[2 * x : 2 * x + 2] if (share := axis.at(value)) == share]
        if highs:
            tops[x] = round(max(highs) * eighths)
            bottoms[x] = round(min(lows) * eighths) if len(lows) == len(highs) else 0
    return bottoms, tops


def _dots(low: int, high: int, *, sparse: bool = False) -> str:
    """Return a braille cell filled between two heights in eighths."""
    rows = range(4 - (high + 1) // 2, 4 - low // 2)
    return chr(BRAILLE + sum(BRAILLE_DOTS[x][y] for y in rows for x in (0, 1) if not sparse or (x + y) % 2))
