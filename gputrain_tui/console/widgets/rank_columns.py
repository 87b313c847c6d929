"""Columns of the rank table: their values, their positions, and the order of the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from gputrain_tui.console.widgets.drawing import cell_count
from gputrain_tui.console.widgets.table_columns import Column, fitting, number_column, text_column
from gputrain_tui.row_filter import RowFilter
from gputrain_tui.state import RankView
from gputrain_tui.state.process_groups import ProcessGroup
from gputrain_tui.state.rank_state import RANK_OUTCOMES
from gputrain_tui.tables import GIB
from trainer.contract.record import RankStateName

Lateness = Mapping[int, float]
"""Lateness in ms by rank, from ``RunState.lateness``."""

PHASES = {
    "data": "data", "h2d": "copying", "forward": "forward", "backward": "backward", "sync": "sync wait",
    "optimizer": "optimizer", "other": "no phase", "group": "waits", "compile": "compiling",
    "threads": "threads", "batch": "batch", "loss": "loss", "gradients": "gradients",
}  # fmt: skip
"""Texts of the state column by phase, for a rank that has been in that phase for unusually long."""
GOING = ("spawned", "joining", "ready", "training", "validating", "saving")
NO_STEP, ENDED, UNKNOWN = "no step", "ended", "unknown"
"""Texts of the state column: no step has come for long; no end was recorded by the rank, or by the run either."""
STATES = (*get_args(RankStateName), *RANK_OUTCOMES, *dict.fromkeys(PHASES.values()), NO_STEP, ENDED, UNKNOWN)


class RankRow(NamedTuple):
    """One rank of the table."""

    view: RankView
    late_ms: float | None
    in_steps: bool = False
    """Whether its rate is in steps a second, because no rank counts samples."""
    standing_still: bool = False
    """Whether no step has come for long."""
    ended: str = ""
    """State of a rank that recorded no end of a run that is over; empty while the run goes on."""


def rate_in_steps(views: Iterable[RankView]) -> bool:
    """Return whether no rank counts samples although some have done steps."""
    return not any(view.totals.counts_samples for view in views) and any(view.totals.steps for view in views)


def _state(row: RankRow) -> str | None:
    """Return a rank's state; in a step that takes unusually long, the phase."""
    view = row.view
    if row.ended and view.display_state in GOING:
        return row.ended
    if view.phase is not None:
        return PHASES[view.phase]
    return NO_STEP if row.standing_still and view.display_state == "training" else view.display_state


def _use(row: RankRow) -> float | None:
    """Return the GPU's utilization in %; without a GPU, the process's CPU use in % of a core."""
    use: float | None = None
    if row.view.gpu is not None:
        use = row.view.gpu.utilization_percent
    elif row.view.process is not None:
        use = row.view.process.cpu_percent
    return use


def _rate(row: RankRow) -> float | None:
    return row.view.sums.steps_per_s if row.in_steps else row.view.sums.samples_per_s


def _mean_ms(key: str, title: str, width: int, order: int) -> Column[RankRow]:
    return number_column(key, width, order, lambda row: row.view.sums.mean_phase_ms(key), title=title, digits=1)


def _of_step(
    key: str, title: str, width: int, order: int, field: str, digits: int, *, of: str = "last"
) -> Column[RankRow]:
    """Return the column of a field of one of a rank's step events, by default its newest one."""

    def value(row: RankRow) -> float | None:
        figure: float | None = getattr(getattr(row.view, of), field, None)
        return figure

    return number_column(key, width, order, value, title=title, digits=digits)


SHARE = "share"
"""Key of the column that is shown only where shares are balanced."""
COLUMNS: tuple[Column[RankRow], ...] = (
    number_column("rank", 4, 0, lambda row: row.view.rank),
    text_column("host", 4, 4, lambda row: row.view.host, role="quiet"),
    text_column("device", 7, 13, lambda row: row.view.device and row.view.device.partition(" ")[0], role="quiet"),
    text_column("state", 9, 6, _state, form=lambda state, width: state.replace("validating", "validate"),
                allowed=STATES),
    _of_step("step", "step", 7, 1, "step", 0),
    number_column(SHARE, 6, 7, lambda row: row.view.share),
    number_column("loss", 7, 2, lambda row: row.view.loss, digits=4),
    _of_step("norm", "g.norm", 6, 12, "grad_norm", 3),
    _of_step("local", "g.own", 6, 16, "local_grad_norm", 3, of="own_norm"),
    number_column("rate", 7, 7, _rate, title="smp/s", digits=1),
    _mean_ms("data", "data ms", 7, 10),
    _mean_ms("forward", "fwd ms", 6, 9),
    _mean_ms("backward", "bwd ms", 6, 8),
    number_column("sync", 7, 3, lambda row: row.view.sums.mean_exposed_ms, title="sync ms", digits=1),
    _mean_ms("optimizer", "opt ms", 6, 14),
    _mean_ms("other", "other ms", 8, 17),
    number_column("late", 7, 5, lambda row: row.late_ms, title="late ms", digits=1),
    number_column("memory", 7, 11, lambda row: row.view.memory_bytes and row.view.memory_bytes / GIB,
                  title="mem GiB", digits=1),
    number_column("use", 5, 15, _use, title="use %"),
)  # fmt: skip
RATE_IN_STEPS = "steps/s"
"""Title of the column ``rate`` where no rank counts samples."""
BY_KEY = {column.key: column for column in COLUMNS}


def goes_down(key: str) -> bool:
    """Return whether the first sort by a column puts the greatest value on top."""
    return BY_KEY[key].is_number and key != "rank"


def rank_filter(text: str = "") -> RowFilter[RankRow]:
    """Return the filter of a line such as ``host:n1 late>5``.

    Raises:
        RequestError: a word cannot be parsed; the message names the allowed forms.
    """
    return RowFilter(text, BY_KEY, _anywhere)


def _anywhere(word: str, row: RankRow) -> bool:
    """Return whether a word without a column matches: a number the rank, else part of host, device or state."""
    view = row.view
    if word.isdecimal():
        return view.rank == int(word)
    part = word.casefold()
    return any(part in text.casefold() for text in (view.host, view.device, view.display_state) if text is not None)


@dataclass(frozen=True)
class PlacedColumn:
    """Position of a column in a table."""

    column: Column[RankRow]
    begin: int
    width: int

    @property
    def end(self) -> int:
        return self.begin + self.width


def _column_cells(column: Column[RankRow], width: int, ranks: int, longest_host: int) -> int:
    """Return the cells of a column in a table ``width`` cells wide."""
    if column.key == "rank":
        return max(column.width, len(str(max(ranks - 1, 0))))
    if column.key == "host":
        return min(max(column.width, longest_host), 24 if width >= 120 else 12)
    return column.width


def _columns(*, balanced: bool) -> list[Column[RankRow]]:
    return [column for column in COLUMNS if balanced or column.key != SHARE]


def whole_width(ranks: int, hosts: Collection[str], *, balanced: bool = False) -> int:
    """Return the cells of a table with all columns and a scroll bar; ``balanced``: as in ``layout``."""
    longest_host = max(map(cell_count, hosts), default=0)
    return 4 + sum(_column_cells(column, 120, ranks, longest_host) + 1 for column in _columns(balanced=balanced))


def layout(width: int, ranks: int, hosts: Collection[str], *, balanced: bool = False) -> list[PlacedColumn]:
    """Return the most important columns, as many as fit, evenly spaced after the two cells of a sign.

    The host is the least important column if all ranks are on one host. ``balanced``: the ranks have shares of the
    global batch, which change.
    """
    longest_host = max(map(cell_count, hosts), default=0)
    cells = {column.key: _column_cells(column, width, ranks, longest_host) for column in COLUMNS}

    def order(column: Column[RankRow]) -> int:
        return len(COLUMNS) if column.key == "host" and len(hosts) < 2 else column.order

    shown = fitting(_columns(balanced=balanced), width - 1, gap=1, cells=cells, order=order)
    gaps = max(len(shown) - 1, 1)
    free = width - 1 - sum(cells[column.key] + 1 for column in shown)
    extra, odd = divmod(min(free, gaps * 2), gaps)  # at most three cells between two columns
    placed: list[PlacedColumn] = []
    begin = 2
    for index, column in enumerate(shown):
        placed.append(PlacedColumn(column, begin, cells[column.key]))
        begin += cells[column.key] + 1 + extra + (1 if index < odd else 0)
    return placed


def latest_of_groups(
    views: Sequence[RankView], groups: Iterable[ProcessGroup], late: Lateness, warned: Collection[int]
) -> list[RankView]:
    """Return one rank of each group: one that failed, else one with a finding, else the latest; and those in none."""

    def order(view: RankView) -> tuple[bool, bool, float]:
        return view.display_state == "failed", view.rank in warned, late.get(view.rank, 0.0)

    of_rank = {rank: group for group in groups for rank in group.ranks}
    chosen: dict[object, RankView] = {}
    for view in views:
        key = of_rank.get(view.rank, view.rank)
        if key not in chosen or order(view) > order(chosen[key]):
            chosen[key] = view
    return list(chosen.values())


def sort_ranks(views: Sequence[RankView], late: Lateness, key: str, *, descending: bool) -> list[RankView]:
    """Return the ranks sorted by a column, equal values by rank; ranks without a value come last."""
    get = BY_KEY[key].value
    in_steps = rate_in_steps(views)
    values = {view.rank: get(RankRow(view, late.get(view.rank), in_steps)) for view in views}
    known = {rank: value for rank, value in values.items() if value is not None and value == value}
    by_rank = sorted(views, key=lambda view: view.rank)
    present: list[Any] = [view for view in by_rank if view.rank in known]
    present.sort(key=lambda view: known[view.rank], reverse=descending)
    return present + [view for view in by_rank if view.rank not in known]
