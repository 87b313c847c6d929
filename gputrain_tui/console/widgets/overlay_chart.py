"""Chart of several runs' curves, numbered at their ends, so that the legend works without colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from gputrain_tui.console.widgets.curve_drawing import BRAILLE, LABEL_CELLS, Axis, Scale, braille_line, plot_limits
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    Row,
    centred_text,
    fit_row,
    format_short,
    merge,
    nice_step,
    pad,
    title_row,
)
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.comparison import Measure
from gputrain_tui.tables import duration, printable


@dataclass(frozen=True, kw_only=True)
class OverlayLine:
    """Curve and figures of one run."""

    name: str
    values: Sequence[float]
    """A value per column, two columns per cell; NaN: none."""
    value: float
    """Newest loss."""
    best: float | None = None
    """Least validation loss."""
    samples_per_s: float | None = None
    """Samples of all ranks per second, over the whole run."""
    sync_share: float | None = None
    """Share of the step time spent waiting for the gradient synchronisation, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Data and options of the chart."""

    lines: Sequence[OverlayLine]
    last: float
    """End of the axis: steps or seconds."""
    over_time: bool
    first: float = 0.0
    """Beginning of the axis."""
    measure: Measure = "loss"
    scale: Scale = "linear"
    remarks: tuple[str, ...] = ()


TITLES: dict[Measure, tuple[str, str]] = {
    "loss": ("loss", "mean of the ranks"),
    "samples_per_s": ("throughput", "samples/s of all ranks"),
    "sync_exposed_ms": ("sync wait", "ms"),
}
"""Title and unit of each measure's chart."""
WIDE_LEGEND_CELLS = 100
"""Fewest cells of a legend with throughput and synchronisation."""


def draw_overlay(overlay: Overlay, width: int, height: int) -> list[Row]:
    """Return the chart as ``height`` rows of ``width`` cells."""
    title, measured_in = TITLES[overlay.measure]
    unit = "time since the start" if overlay.over_time else "steps"
    remarks = [[(remark, "dim")] for remark in (*overlay.remarks, *(["log"] if overlay.scale == "log" else []))]
    rows = [title_row(width, [(title, "title"), (f"  {measured_in} over {unit}", "dim")], remarks)]
    plot_height = height - 2
    limits = plot_limits((line.values for line in overlay.lines), overlay.scale)
    if limits is None or plot_height < 2 or width < LABEL_CELLS + 8:
        return rows + centred_text(width, height - 1, ["no step yet"])
    axis = Axis(*limits, plot_height, overlay.scale)
    labels = axis.labels(plot_height)
    cells = width - LABEL_CELLS - 2
    drawn = [braille_line(line.values, axis, cells, plot_height) for line in overlay.lines]
    numbers = _numbers(drawn, cells) if len(drawn) > 1 else {}
    for y in range(plot_height):
        label = labels.get(y, "")
        pieces: Row = [(label.rjust(LABEL_CELLS), "dim"), (" ┤" if label else " │", "rule")]
        ground = "┈" if label else " "
        for x in range(cells):
            if (x, y) in numbers:
                pieces.append(numbers[x, y])
                continue
            # A cell has one colour: where curves meet, only the first one is drawn.
            curve = next((index for index, cells_of in enumerate(drawn) if cells_of[y][x]), None)
            bits = 0 if curve is None else drawn[curve][y][x]
            pieces.append((ground, "rule") if curve is None else (chr(BRAILLE + bits), f"curve-{curve}"))
        rows.append(fit_row(merge(pieces), width))
    rows.append(_ends(overlay, width))
    return rows


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


def _ends(overlay: Overlay, width: int) -> Row:
    """Return the labels of the horizontal axis."""
    cells = width - LABEL_CELLS - 2
    line = [" "] * width
    end = duration(overlay.last) if overlay.over_time else f"step {overlay.last:,.0f}"
    free = width - len(end)
    line[free:] = end
    span = overlay.last - overlay.first
    distance = nice_step(span, max(1, cells // 16)) if span > 0 else 0
    number, busy = ceil(overlay.first / distance) if distance else 0, 0
    while distance and number * distance < overlay.last:
        at = number * distance
        text = duration(at) if overlay.over_time else f"{at:,.0f}"
        begin = LABEL_CELLS + 2 + int((at - overlay.first) / span * cells)
        if begin >= busy and begin + len(text) + 2 <= free:
            line[begin : begin + len(text)] = text
            busy = begin + len(text) + 2
        number += 1
    return [("".join(line), "dim")]


def legend(lines: Sequence[OverlayLine], width: int) -> list[Row]:
    """Return a line per run: number, colour, name, newest loss, best validation loss; in wide panels more."""
    is_wide = width >= WIDE_LEGEND_CELLS
    names = max(width - 7 - 2 * 14 - (36 if is_wide else 0), 8)
    rows = []
    for index, line in enumerate(lines):
        best = loss_text(line.best)
        row: Row = [
            (f" {index + 1} ━━ ", f"curve-{index}"),
            (pad(printable(line.name), names), "bright"),
            ("  loss", "dim"),
            (loss_text(line.value).rjust(8) if isfinite(line.value) else EMPTY.rjust(8), "bright"),
            (" valid", "dim"),
            (best.rjust(8), "bright"),
        ]
        if is_wide:
            rate = EMPTY if line.samples_per_s is None else format_short(line.samples_per_s, 9).strip()
            waited = EMPTY if line.sync_share is None else f"{line.sync_share:.1%}"
            row += [("  samples/s", "dim"), (rate.rjust(10), "bright"), ("  sync", "dim"), (waited.rjust(8), "bright")]
        rows.append(fit_row(row, width))
    return rows
