"""Heat map of the ranks' lateness over the steps, two ranks or groups of ranks per line."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import median

from gputrain_tui.console.ramp import HEAT_LEVELS
from gputrain_tui.console.widgets.chart_view import LABEL_CELLS, XAxis
from gputrain_tui.console.widgets.drawing import (
    Row,
    centred_text,
    fit_rows,
    format_value,
    group_size,
    merge,
    row_cells,
    title_row,
)
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.history.series import METRICS, Series

SHAPES = "·:-=+*%#"
LATE = METRICS.index("late_ms")
LEVEL_SHARES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.25, 0.5)
"""Lateness, as a share of the step time, where each level above the first begins: the same in every run.

From a tenth on the colours are warm: all ranks lose that share of their time, since they wait for the latest one.
"""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Data and options of the map."""

    columns: Sequence[Sequence[float]]
    """Lateness in ms, [column][group of ranks]; an empty column or NaN where nothing was measured."""
    ranks: int
    group: int
    """Ranks per group; the map shows the latest rank of each."""
    first_step: int
    last_step: int
    step_ms: float = nan
    """Median step time, ms, by which the levels are scaled."""
    latest: tuple[int, float] | None = None
    selected: int | None = None
    failed: Collection[int] = ()
    """Ranks that failed themselves, not those that lost a peer or were stopped."""
    flagged: Collection[int] = ()


def map_rows(height: int) -> int:
    """Return the lines of the map without title and axis in a panel of ``height`` lines."""
    return height - (2 if height > 5 else 1)


def heat_lines(ranks: int, height: int) -> int:
    """Return the lines, at most ``height``, that a map of ``ranks`` ranks can use."""
    rows = map_rows(height)
    if rows < 1:
        return max(height, 0)
    group = group_size(ranks, 2 * rows)
    groups = -(-ranks // group)
    used = -(-groups * _stretch(groups, group, rows) // 2) + height - rows
    return used if map_rows(used) == used - height + rows else height


def _stretch(groups: int, group: int, rows: int) -> int:
    """Return the half lines per group: more than one only if a group is a single rank."""
    return max(2 * rows // max(groups, 1), 1) if group == 1 else 1


def thresholds(step_ms: float) -> list[float]:
    """Return the lower limits of the levels above the first, ms, rounded to two digits."""
    return [float(f"{share * step_ms:.1e}") for share in LEVEL_SHARES]


def usual_step_ms(series: Series, last: int | None = None) -> float:
    """Return the median step time over the last ``last`` steps, None being all, ms; NaN if none was measured."""
    columns = 64  # columns of step times over which the median is taken
    steps = [value for value in series.window("step_ms", columns, last=last).middle if isfinite(value)]
    return median(steps) if steps else nan


def heat_columns(series: Series, width: int, group: int, *, last: int | None = None) -> list[list[float]]:
    """Return the mean lateness, ms, [column][group], of the latest rank in each group, up to the newest column."""
    first, end = series.span(last)
    scale = width / (end - first + 1)
    sums: list[list[float]] = [[] for _ in range(width)]
    counts = [0] * width
    for frame in series.frames(first, end, 4 * width):
        late = frame.values[LATE]
        if late is None:
            continue
        if frame.cache is None or frame.cache[0] != group:
            frame.cache = (group, _latest(late, group))
        values = frame.cache[1]
        begin = min(max(int((frame.first_step - first) * scale), 0), width - 1)
        for column in range(begin, max(begin + 1, min(int((frame.last_step + 1 - first) * scale), width))):
            before = sums[column]
            if len(before) == len(values):
                sums[column] = [a + b for a, b in zip(before, values, strict=True)]
                counts[column] += 1
            else:
                sums[column], counts[column] = values, 1
    newest = max((column for column in range(width) if counts[column]), default=-1)
    out: list[list[float]] = []
    for total, count in zip(sums[: newest + 1], counts, strict=False):
        if count:
            out.append([value / count for value in total] if count > 1 else total)
        else:  # between two steps that were measured
            out.append(out[-1] if out else [])
    return out


def _latest(late: array[float], group: int) -> list[float]:
    """Return the greatest lateness in each group; NaN if no rank of it has a value."""
    if group == 1:
        return list(late)
    if isfinite(sum(late)):
        return [max(late[begin : begin + group]) for begin in range(0, len(late), group)]
    return [
        max((value for value in late[begin : begin + group] if isfinite(value)), default=nan)
        for begin in range(0, len(late), group)
    ]


def draw_heat(heat: Heat, width: int, height: int, *, symbols: bool = False) -> list[Row]:
    """Return the map as ``height`` rows of ``width`` cells."""
    left: Row = [("late", "title")]
    finite = (value for column in heat.columns for value in column if value == value)
    first = next(finite, None)
    lines, cells = map_rows(height), width - LABEL_CELLS - 2
    if first is None or cells < 1 or lines < 1:
        why = "lateness needs two ranks or more" if heat.ranks < 2 else "no synchronisation was measured yet"
        return fit_rows([title_row(width, left), *centred_text(width, height - 1, [why])], width, height)
    limits = thresholds(heat.step_ms if heat.step_ms > 0 else max(first, *finite, 1.0))
    levels = [(SHAPES[level] if symbols else "■", f"heat:{level}") for level in range(HEAT_LEVELS)]
    legend: Row = [("ms ", "dim"), levels[0]]
    for level, limit in zip(levels[1:], limits, strict=True):
        legend += [(f" {limit:g} ", "dim"), level]
    legend.append(("+", "dim"))
    # The longest title, so that the legend stays while the latest rank changes, or is not known.
    left_cells = len(f"late 0.00123 ms  rank {heat.ranks - 1}") + 6
    if left_cells + row_cells(legend) > width:
        legend = [("0 ", "dim"), *levels, (f" {limits[-1]:g}+ ms", "dim")]
    if heat.latest is not None:
        rank, late = heat.latest
        left += [(" ", "base"), (format_value(late), "bright")]
        left += [(f" ms  rank {rank}", "dim")] if left_cells + row_cells(legend) <= width else []
    rows = [title_row(width, left, [legend])]
    groups = -(-heat.ranks // heat.group)
    half_lines = _stretch(groups, heat.group, lines)
    columns = [[bisect_right(limits, value) if value == value else None for value in col] for col in heat.columns]
    for line in range(-(-groups * half_lines // 2)):
        upper, lower = 2 * line // half_lines, (2 * line + 1) // half_lines
        begun = [group for group in (upper, lower) if group < groups and group * half_lines // 2 == line]
        pieces = (
            _cell(_level_at(column, upper, groups), _level_at(column, lower, groups), symbols)
            for column in columns[:cells]
        )
        rows.append([_label(heat, begun), ("  ", "base"), *merge(pieces)])
    if lines < height - 1:
        rows.append(XAxis(first_step=heat.first_step, last_step=heat.last_step).labels(width))
    return fit_rows(rows, width, height)


def _level_at(column: Sequence[int | None], group: int, groups: int) -> int | None:
    return column[group] if group < min(groups, len(column)) else None


def _label(heat: Heat, groups: Sequence[int]) -> tuple[str, str]:
    """Return the label of the groups that begin in a line: a failed, selected or flagged rank, else the ranks."""
    if not groups:
        return " " * LABEL_CELLS, "axis"
    first, end = groups[0] * heat.group, min((groups[-1] + 1) * heat.group, heat.ranks)
    for sign, role, ranks in (
        ("✗", "error", heat.failed),
        ("▸", "accent", () if heat.selected is None else (heat.selected,)),
        ("!", "warning", heat.flagged),
    ):
        rank = min((rank for rank in ranks if first <= rank < end), default=None)
        if rank is not None:
            return f"{sign}{rank}".rjust(LABEL_CELLS), role
    text = f"{first}" if end - first == 1 else f"{first}–{end - 1}"
    return (text if len(text) <= LABEL_CELLS else f"{first}…").rjust(LABEL_CELLS), "axis"


def _cell(upper: int | None, lower: int | None, symbols: bool) -> tuple[str, str]:
    """Return one cell: an upper and a lower half in the colours of their levels, or a symbol of the greater level."""
    if upper is None and lower is None:
        return " ", "base"
    if symbols:
        return SHAPES[max(level for level in (upper, lower) if level is not None)], "base"
    if lower is None:
        return "▀", f"heat:{upper}"
    if upper is None:
        return "▄", f"heat:{lower}"
    return ("█", f"heat:{upper}") if upper == lower else ("▀", f"heat:{upper}:{lower}")


class LatenessMap(Panel):
    """Panel of the lateness of every rank over the run."""

    last: int | None = None

    def show(self, *, last: int | None) -> None:
        self.last = last
        self.redraw()

    def seen_version(self) -> object:
        state = self.live.state
        return self.live.series.version, len(state.failures), state.flagged, state.ended is not None

    def draw(self, width: int, height: int) -> list[Row]:
        series, state = self.live.series, self.live.state
        group = group_size(series.world_size, 2 * map_rows(height))
        first, end = series.span(self.last)
        ranks = state.ranks.values() if state.failures else ()
        heat = Heat(
            columns=heat_columns(series, max(width - LABEL_CELLS - 2, 1), group, last=self.last),
            ranks=series.world_size,
            group=group,
            first_step=first,
            last_step=end,
            step_ms=usual_step_ms(series, self.last),
            latest=state.latest(),
            selected=self.selected_rank,
            failed={view.rank for view in ranks if view.display_state == "failed"},
            flagged=state.flagged,
        )
        return draw_heat(heat, width, height, symbols=self.ramp.symbols)
