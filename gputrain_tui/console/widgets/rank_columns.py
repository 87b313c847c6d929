"""Columns of the rank table: their values and widths, and the order in which narrow tables drop them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gputrain_tui.console.widgets.drawing import EMPTY, GIB, cell_count, format_number, pad, without_controls
from gputrain_tui.state import RankView

Value = float | str | None
Lateness = Mapping[int, float]
"""Lateness in ms by rank, from ``RunState.lateness``."""

MOST_GAP_CELLS = 3
"""Most cells between two columns."""
SHORTER = {"validating": "validate"}
"""Shorter words for states that are longer than their column."""
PHASES = {
    "data": "data", "h2d": "copying", "forward": "forward", "backward": "backward", "sync": "sync wait",
    "optimizer": "optimizer", "other": "no phase", "group": "waits", "compile": "compiling",
    "batch": "batch", "loss": "loss", "gradients": "gradients",
}  # fmt: skip
"""Texts of the state column by phase, for a rank that has been in that phase for unusually long."""
MOST_HOST_CELLS = 24
"""Most cells of the host column; longer names are cropped."""


@dataclass(frozen=True)
class RankColumn:
    """One column of the table."""

    key: str
    """Name in filters and for sorting."""
    title: str
    """Title with the unit."""
    width: int
    """Cells; of the rank and host columns the least, since they grow with their longest value."""
    order: int
    """Order of importance: narrow tables drop the columns with the greatest numbers."""
    digits: int | None
    """Decimals; None: text, left-aligned."""
    value: Callable[[RankView, Lateness], Value]
    """Value for sorting and filtering; None if it was not measured."""
    descending: bool = True
    """Whether the first sort puts the greatest value on top."""

    def text(self, view: RankView, late: Lateness, width: int) -> str:
        """Return the text of a cell, exactly ``width`` cells long."""
        value = self.value(view, late)
        if isinstance(value, str):
            value = SHORTER.get(value, value)
            return pad(without_controls(value), width)
        if self.digits is None:
            return EMPTY.ljust(width)
        if value is not None and value != value:
            return "nan".rjust(width)
        if self.digits == 0 and value is not None and len(text := f"{value:.0f}") <= width:
            return text.rjust(width)
        return format_number(value, self.digits, width)


def _step_field(name: str) -> Callable[[RankView, Lateness], Value]:
    """Return a getter of a field of a rank's newest step event."""

    def value(view: RankView, late: Lateness) -> Value:
        found: float | None = getattr(view.last, name, None)
        return found

    return value


def _state(view: RankView, late: Lateness) -> Value:
    """Return a rank's state; in a step that takes unusually long, the phase."""
    return PHASES[view.phase] if view.phase is not None else view.display_state


def _memory(view: RankView, late: Lateness) -> Value:
    count = view.memory_bytes
    return None if count is None else count / GIB


def _use(view: RankView, late: Lateness) -> Value:
    """Return the GPU's utilization in %; without a GPU, the process's CPU use in % of a core."""
    if view.gpu is not None:
        gpu: float | None = view.gpu.utilization_percent
        return gpu
    cpu: float | None = view.process.cpu_percent if view.process is not None else None
    return cpu


COLUMNS: tuple[RankColumn, ...] = (
    RankColumn("rank", "rank", 4, 0, 0, lambda v, _: v.rank, descending=False),
    RankColumn("host", "host", 4, 4, None, lambda v, _: v.host, descending=False),
    RankColumn("device", "device", 7, 13, None, lambda v, _: v.device and v.device.partition(" ")[0], descending=False),
    RankColumn("state", "state", 9, 6, None, _state, descending=False),
    RankColumn("step", "step", 7, 1, 0, lambda v, _: v.last.step if v.last else None),
    RankColumn("loss", "loss", 7, 2, 4, lambda v, _: v.loss),
    RankColumn("norm", "g.norm", 6, 12, 3, _step_field("grad_norm")),
    RankColumn("local", "g.own", 6, 16, 3, _step_field("local_grad_norm")),
    RankColumn("rate", "smp/s", 7, 7, 1, lambda v, _: v.sums.samples_per_s),
    RankColumn("data", "data ms", 7, 10, 1, lambda v, _: v.sums.mean_phase_ms("data")),
    RankColumn("forward", "fwd ms", 6, 9, 1, lambda v, _: v.sums.mean_phase_ms("forward")),
    RankColumn("backward", "bwd ms", 6, 8, 1, lambda v, _: v.sums.mean_phase_ms("backward")),
    RankColumn("sync", "sync ms", 7, 3, 1, lambda v, _: v.sums.mean_exposed_ms),
    RankColumn("optimizer", "opt ms", 6, 14, 1, lambda v, _: v.sums.mean_phase_ms("optimizer")),
    RankColumn("late", "late ms", 7, 5, 1, lambda v, late: late.get(v.rank)),
    RankColumn("memory", "mem GiB", 7, 11, 1, _memory),
    RankColumn("use", "use %", 5, 15, 0, _use),
)
BY_KEY: dict[str, RankColumn] = {column.key: column for column in COLUMNS}


@dataclass(frozen=True)
class ColumnPlace:
    """Position of a column in a table."""

    column: RankColumn
    begin: int
    """First cell."""
    width: int

    @property
    def end(self) -> int:
        """Cell after the column's last one."""
        return self.begin + self.width


def _column_cells(column: RankColumn, width: int, ranks: int, longest_host: int) -> int:
    """Return the cells of a column in a table ``width`` cells wide."""
    if column.key == "rank":
        return max(column.width, len(str(max(ranks - 1, 0))))
    if column.key == "host":
        return min(max(column.width, longest_host), MOST_HOST_CELLS if width >= 120 else 12)
    return column.width


def whole_width(ranks: int, hosts: Collection[str]) -> int:
    """Return the cells of a table with all columns and a scroll bar."""
    longest_host = max(map(cell_count, hosts), default=0)
    return 4 + sum(_column_cells(column, 120, ranks, longest_host) + 1 for column in COLUMNS)


def layout(width: int, ranks: int, hosts: Collection[str]) -> list[ColumnPlace]:
    """Return the most important columns, as many as fit, evenly spaced after two cells for marks."""
    longest_host = max(map(cell_count, hosts), default=0)

    def column_width(column: RankColumn) -> int:
        return _column_cells(column, width, ranks, longest_host)

    def order(column: RankColumn) -> int:
        """Return the order of importance; the host column comes last if all ranks are on one host."""
        return len(COLUMNS) if column.key == "host" and len(hosts) < 2 else column.order

    room = width - 2
    chosen: list[RankColumn] = []
    for column in sorted(COLUMNS, key=order):
        if column_width(column) + (1 if chosen else 0) > room:
            break
        room -= column_width(column) + (1 if chosen else 0)
        chosen.append(column)
    shown = [column for column in COLUMNS if column in chosen]
    gaps = max(len(shown) - 1, 1)
    extra, odd = divmod(min(room, gaps * (MOST_GAP_CELLS - 1)), gaps)
    places: list[ColumnPlace] = []
    begin = 2
    for index, column in enumerate(shown):
        places.append(ColumnPlace(column, begin, column_width(column)))
        begin += column_width(column) + 1 + extra + (1 if index < odd else 0)
    return places


def sort_ranks(views: Sequence[RankView], late: Lateness, key: str, *, descending: bool) -> list[RankView]:
    """Return the ranks sorted by a column, equal values by rank; ranks without a value come last."""
    get = BY_KEY[key].value
    keyed = [(get(view, late), view.rank, view) for view in views]
    absent = sorted(
        ((rank, view) for value, rank, view in keyed if value is None or value != value), key=lambda pair: pair[0]
    )
    present = [item for item in keyed if item[0] is not None and item[0] == item[0]]
    present.sort(key=lambda item: item[1])
    present.sort(key=_sort_value, reverse=descending)
    return [item[2] for item in present] + [view for _, view in absent]


def _sort_value(item: tuple[Value, int, RankView]) -> float | str:
    value = item[0]
    assert value is not None
    return value
