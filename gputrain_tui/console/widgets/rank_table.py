"""Drawing of the rank table as rows: title, column titles and a line per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gputrain_tui.console.widgets.canvas import with_background
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    Row,
    centred_text,
    crop,
    fit_row,
    fit_rows,
    merge,
    scroll_thumb,
    title_row,
)
from gputrain_tui.console.widgets.rank_columns import BY_KEY, RATE_IN_STEPS, Lateness, PlacedColumn, RankRow, layout
from gputrain_tui.state import RankView
from gputrain_tui.state.rank_state import RANK_OUTCOMES
from gputrain_tui.tables import printable

HEAD_LINES = 2


@dataclass(kw_only=True)
class GridView:
    """Content of the table."""

    rows: Sequence[RankView]
    ranks: int
    late: Lateness = field(default_factory=dict)
    warned: Collection[int] = ()
    top: int = 0
    cursor: int | None = None
    focused: bool = False
    sort_key: str = "rank"
    descending: bool = False
    filter_text: str = ""
    one_of_each: str = ""
    """Process groups of which one rank each is shown; empty: all ranks are."""
    hosts: Collection[str] = ()
    failing: bool = False
    """Whether a rank failed: the ranks that ended because of it are dimmed."""
    standing_still: bool = False
    """Whether no step has come for long: throughputs are left out, and ``training`` becomes ``no step``."""
    in_steps: bool = False
    """Whether rates are in steps a second, because no rank counts samples."""
    balanced: bool = False
    """Whether the ranks have shares of the global batch, which change."""
    span: str = ""
    """Steps that the means are taken over, as text."""
    ended: str = ""
    """After the end of the run, text in the state column for ranks that recorded no end; empty: the run goes on."""


def visible_ranks(height: int) -> int:
    """Return the number of ranks that a table of ``height`` lines shows at once."""
    return max(height - HEAD_LINES, 0)


def draw_grid(grid: GridView, width: int, height: int) -> list[Row]:
    """Return the grid as ``height`` rows of ``width`` cells."""
    visible = visible_ranks(height)
    scrolls = len(grid.rows) > visible
    columns = layout(width - (2 if scrolls else 1), grid.ranks, grid.hosts, balanced=grid.balanced)
    rows = fit_rows([_head(grid, width, visible), _titles(grid, columns)], width, min(height, HEAD_LINES))
    shown = grid.rows[grid.top : grid.top + visible]
    if not shown:
        none = [crop(f"no rank matches {printable(grid.filter_text)!r}", width), "esc clears the filter"]
        return rows + centred_text(width, visible, none if grid.filter_text else ["no rank has reported yet"])
    thumb = scroll_thumb(grid.top, visible, len(grid.rows))
    for y, view in enumerate(shown):
        row = fit_row(_line(grid, view, columns), width - scrolls)
        if view.rank == grid.cursor:
            row = with_background(row, "cursor" if grid.focused else "cursor-unfocused")
        if scrolls:
            row.append(("┃", "dim") if y in thumb else ("│", "rule"))
        rows.append(row)
    return rows + fit_rows([], width, height - len(rows))


def _head(grid: GridView, width: int, visible: int) -> Row:
    left: Row = [("ranks", "title"), (" ", "base"), (f"{grid.ranks:,}", "bright")]
    standings = Counter(view.display_state for view in grid.rows) if grid.failing else Counter()
    for standing, role in (("failed", "error"), *((word, "victim") for word in RANK_OUTCOMES)):
        if standings[standing]:
            left += [("  ", "base"), (f"{standings[standing]:,} {standing}", role)]
    if grid.filter_text:
        left += [("  /", "dim"), (printable(grid.filter_text), "accent"), (f"  {len(grid.rows):,}", "bright")]
    if grid.one_of_each:
        left += [("  one of each ", "dim"), (printable(grid.one_of_each), "accent")]
        left.append((f"  {len(grid.rows):,}", "bright"))
    rights: list[Row] = [[(grid.span, "dim")]] if grid.span else []
    if len(grid.rows) > visible:
        last = min(grid.top + visible, len(grid.rows))
        rights.append([(f"{grid.top + 1:,}–{last:,}", "dim")])
    if grid.sort_key != "rank" or grid.descending:
        direction = "down" if grid.descending else "up"
        rights.append([(f"by {_title(grid, grid.sort_key)}, {direction}", "dim")])
    return title_row(width, left, rights)


def _title(grid: GridView, key: str) -> str:
    return RATE_IN_STEPS if key == "rate" and grid.in_steps else BY_KEY[key].title


def _titles(grid: GridView, columns: Sequence[PlacedColumn]) -> Row:
    row: Row = []
    at = 0
    arrow = "▾" if grid.descending else "▴"
    for placed in columns:
        column = placed.column
        chosen = column.key == grid.sort_key
        if column.is_number:  # the arrow may stand in the gap before the column
            text = f"{arrow if chosen else ''}{_title(grid, column.key)}".rjust(placed.width)
        else:
            text = f"{column.title}{arrow if chosen else ''}"[: placed.width].ljust(placed.width)
        row += [(" " * (placed.end - len(text) - at), "base"), (text, "accent" if chosen else "column")]
        at = placed.end
    return row


def _line(grid: GridView, view: RankView, columns: Sequence[PlacedColumn]) -> Row:
    """Return one rank's line."""
    row = RankRow(view, grid.late.get(view.rank), grid.in_steps, grid.standing_still, grid.ended)
    failed = view.display_state == "failed"
    warned = view.rank in grid.warned
    sign = ("▸ " if view.rank == grid.cursor else "  ", "accent")
    if failed:
        sign = ("✗ ", "error")
    elif view.outcome is not None and grid.failing:
        sign = ("╌ ", "victim")
    elif warned:
        sign = ("▲ ", "warning")
    pieces: Row = [sign]
    value_role = "error-text" if failed else "value"
    at = 2
    for placed in columns:
        column, width = placed.column, placed.width
        text = column.text(row, width)
        role = value_role if column.is_number else column.role_of(row)
        if grid.standing_still and column.key == "rate":
            text = EMPTY.rjust(width)
        if column.key == "state":
            role = _state_role(view, failing=grid.failing)
        elif column.key == "late" and warned:
            role = "warning"
        if text.strip() == EMPTY:
            role = "absent"
        pieces.append((" " * (placed.begin - at), pieces[-1][1]))
        pieces.append((text, role))
        at = placed.end
    return merge(pieces)


def _state_role(view: RankView, *, failing: bool) -> str:
    state = view.display_state
    if view.phase is not None:
        return "quiet" if view.phase in ("sync", "group") else "warning"
    if state in RANK_OUTCOMES:
        return "victim" if failing else "quiet"
    return "error" if state == "failed" else "quiet" if state in ("training", "finished") else "bright"
