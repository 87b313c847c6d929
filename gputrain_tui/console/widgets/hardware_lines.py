"""Panel of hosts and GPUs over the run: a line for each of use, memory, temperature and power."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import Row, bar_below, centred_text, fit_row, format_value, pad, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.history.hardware_series import HardwareSeries, SeriesKey, TimeSeries
from gputrain_tui.tables import duration, printable

NAME_CELLS, VALUE_CELLS = 30, 22
"""Cells of a line before its curve: host, GPU and quantity; newest and greatest value."""


def draw_hardware(hardware: HardwareSeries, width: int, height: int, *, first: int | None = None) -> list[Row]:
    """Return the lines, those of the node ``first`` on top."""
    series = list(hardware.series(first=first))
    left: Row = [("hardware", "title"), (f"  {len(hardware.hosts)} hosts" if len(hardware.hosts) > 1 else "", "dim")]
    if not series:
        return [fit_row(title_row(width, left), width), *centred_text(width, height - 1, ["no sample yet"])]
    hidden = len(series) - (height - 1)
    rights: list[Row] = [[(f"{hidden:,} more lines", "dim")]] if hidden > 0 else []
    rights.append([(f"the last {duration(hardware.end - hardware.begin)}", "dim")])
    rows = [title_row(width, left, rights)]
    before: tuple[int, int] | None = None
    for key, values in series[: height - 1]:
        rows.append(_line(hardware, key, values, width, named=(key.machine, key.gpu) != before))
        before = key.machine, key.gpu
    return [fit_row(row, width) for row in rows]


def _line(hardware: HardwareSeries, key: SeriesKey, series: TimeSeries, width: int, *, named: bool) -> Row:
    cells = max(width - NAME_CELLS - VALUE_CELLS - 1, 1)
    shared_scale = 1.25  # ratio of a curve's top to its greatest value, if the quantity has no limit
    top = series.limit or shared_scale * series.greatest
    values = series.columns(hardware.begin, hardware.end, cells)
    bars = "".join(bar_below(value, top) for value in values)
    host = printable(hardware.hosts[key.machine])
    where = host if key.gpu < 0 else f"{host} GPU {key.gpu}"
    newest = series.newest if key.machine in hardware.machine_of_node.values() else None  # the run has lost it
    return [
        (" ", "base"),
        (pad(where if named else "", NAME_CELLS - 16), "bright"),
        (" ", "base"),
        (pad(key.quantity, 14), "dim"),
        (format_value(newest).rjust(8), "bright"),
        (f"  peak {format_value(series.greatest)}".ljust(VALUE_CELLS - 8), "dim"),
        (bars, "accent" if series.limit and series.newest > 0.9 * series.limit else "bar"),
    ]


class HardwareLines(Panel):
    """Panel of use, memory, temperature and power of hosts and GPUs."""

    def seen_version(self) -> object:
        return self.live.hardware.version

    def draw(self, width: int, height: int) -> list[Row]:
        rank = self.selected_rank
        view = None if rank is None else self.live.state.ranks.get(rank)
        return draw_hardware(self.live.hardware, width, height, first=None if view is None else view.node)
