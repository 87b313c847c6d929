"""Layout of a run's panels, by terminal size, number of ranks and chosen panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget

from gputrain_tui.console.widgets.lateness_map import heat_lines
from gputrain_tui.console.widgets.rank_table import HEAD_LINES
from gputrain_tui.console.widgets.step_bars import bar_lines

PanelName = Literal["ranks", "loss", "sync", "bars", "late", "findings", "log", "hardware"]
PANELS: tuple[PanelName, ...] = ("ranks", "loss", "sync", "bars", "late", "findings", "log")
"""Panels in the order of the key for the next panel; not the hardware panel, which is shown only zoomed."""
LEAST_LIST_LINES = 5
GAP_CELLS = 2
"""Cells between two columns of panels."""
MEDIUM_CELLS, MEDIUM_LINES = 96, 25
"""Fewest cells and lines in which all panels but either findings or log can be read at once."""
COLUMN_CELLS, STACKED_LINES = 38, 8
"""Fewest cells of a panel beside another, and fewest lines of one above another, in the narrow layout."""
MOST_PANELS = 4
"""Most panels besides the table in the narrow layout."""
CHARTS: tuple[PanelName, ...] = ("loss", "sync", "bars", "late")
"""Panels that are empty before the first step."""


@dataclass(frozen=True, kw_only=True)
class PanelChoice:
    """Panels to show, and the facts that their layout depends on."""

    ranks: int
    panel: PanelName = "loss"
    right: PanelName = "findings"
    """The panel to show of findings and log, which share a place in the medium layout."""
    zoomed: bool = False
    rendezvous: bool = False
    """Whether no rank has made a step, so that the rendezvous is shown instead of empty charts."""
    hosts: int = 1
    """Number of hosts, each of which has a line in the rendezvous panel."""
    table_cells: int = 0
    """Cells of the table with all columns; 0: unknown."""
    root_cause_lines: int = 0
    """Lines that the root cause card needs; 0: no card."""


def layout_size(width: int, height: int) -> Literal["narrow", "medium", "wide"]:
    """Return the layout for a size."""
    if width < MEDIUM_CELLS or height < MEDIUM_LINES:
        return "narrow"
    return "wide" if width >= 160 and height >= 44 else "medium"


def arrange(width: int, height: int, choice: PanelChoice) -> dict[str, Region]:
    """Return the visible panels by name, and their regions, which do not overlap."""
    if width < 1 or height < 1:
        return {}
    if choice.zoomed:
        return {choice.panel: Region(0, 0, width, height)}
    placed: dict[str, Region] = {}
    area = Region(0, 0, width, height)
    if choice.root_cause_lines:
        root_cause_lines = min(choice.root_cause_lines, max(height // 2, 3))
        placed["root_cause"], area = area.split_horizontal(root_cause_lines)
    size = layout_size(area.width, area.height)
    placed |= _narrow(area, choice) if size == "narrow" else _large(area, choice, wide=size == "wide")
    return {name: region for name, region in placed.items() if region.width > 0 and region.height > 0}


def _narrow(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Return the narrow layout: the table, below it as many panels as can be read, stacked or else side by side."""
    if choice.panel == "ranks" or area.height < 8:
        return {"ranks": area}
    top, below = area.split_horizontal(_table_height(area, choice, share=0.45))
    columns, lines = grid_shape(below)
    names = _chosen_panels(choice, min(columns * lines, MOST_PANELS), narrow=columns > 1 and lines == 1)
    return {"ranks": top, **place_in_grid(below, names, columns)}


def grid_shape(area: Region) -> tuple[int, int]:
    """Return the columns and lines of panels that can be read in an area; lines are preferred to columns."""
    lines = max(area.height // STACKED_LINES, 1)
    side_by_side = max((area.width + GAP_CELLS) // (COLUMN_CELLS + GAP_CELLS), 1)
    return min(side_by_side, 3 if lines == 1 else 2 if area.width >= MEDIUM_CELLS else 1), lines


def place_in_grid(area: Region, names: Sequence[str], columns: int) -> dict[str, Region]:
    """Return the regions of panels in at most ``columns`` columns, each filled from the top."""
    columns = min(columns, len(names))
    lines = -(-len(names) // columns)
    placed: dict[str, Region] = {}
    for number, column in enumerate(_columns(area, columns)):
        stack = names[number * lines : (number + 1) * lines]
        edges = [column.height * index // len(stack) for index in range(len(stack) + 1)]
        for name, begin, end in zip(stack, edges, edges[1:], strict=False):
            placed[name] = Region(column.x, column.y + begin, column.width, end - begin)
    return placed


def _chosen_panels(choice: PanelChoice, count: int, *, narrow: bool) -> Sequence[str]:
    """Return ``count`` panels in the order of ``PANELS``, the chosen one included; ``narrow``: for few cells each."""
    panel = choice.panel
    if choice.rendezvous:
        first = "rendezvous" if panel in CHARTS else panel
        return [first] if count < 2 or narrow or first == "log" else [first, "log"]
    if narrow and panel == "log":
        return [panel]
    lists: list[PanelName] = ["findings", "sync"] if choice.right == "findings" else ["sync"]
    order: list[PanelName] = ["loss", *lists, "log", "bars", "late", "findings"]
    if narrow:
        order.remove("log")
    shown = order[:count] if panel in order[:count] else [*order[: count - 1], panel]
    return sorted(shown, key=PANELS.index)


def _large(area: Region, choice: PanelChoice, *, wide: bool) -> dict[str, Region]:
    """Return the medium or wide layout: table and charts, with findings or log; the wide one has both."""
    if choice.ranks + HEAD_LINES <= max(area.height * 0.34, 6):  # the whole table fits above the charts
        return _table_above_charts(area, choice)
    lists: tuple[PanelName, ...] = ("findings", "log") if wide else (choice.right,)
    return _table_beside_charts(area, choice, max(area.height // 4, 8 if wide else 6), lists)


def _table_above_charts(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Return the table above all other panels; a wide area has the findings beside it."""
    top, rest = area.split_horizontal(_table_height(area, choice, share=0.34))
    findings_cells, findings_lines = 48, 8  # fewest cells and lines of the findings beside the table
    if not choice.rendezvous:
        table, findings = top, None
        if 0 < choice.table_cells <= area.width - GAP_CELLS - findings_cells and top.height >= findings_lines:
            table, beside = top.split_vertical(max(choice.table_cells, area.width - GAP_CELLS - 2 * findings_cells))
            findings = Region(beside.x + GAP_CELLS, beside.y, beside.width - GAP_CELLS, beside.height)
        return {"ranks": table, **_panels_below_table(rest, choice, findings)}
    rendezvous, log = _columns(rest, 2)
    return {"ranks": top, "rendezvous": rendezvous, "log": log}


def _table_beside_charts(
    area: Region, choice: PanelChoice, low: int, lists: tuple[PanelName, ...]
) -> dict[str, Region]:
    """Return the table beside the charts; below both, ``low`` lines high, step bars and ``lists``."""
    if choice.rendezvous:
        left, right = _columns(area, 2)
        head_lines = 8  # lines of the rendezvous panel besides one per host
        rendezvous, log = right.split_horizontal(min(choice.hosts + head_lines, (right.height + 1) // 2))
        return {"ranks": left, "rendezvous": rendezvous, "log": log}
    upper, bottom = area.split_horizontal(area.height - low)
    left, right = _columns(upper, 2)
    if choice.ranks + HEAD_LINES + 4 <= upper.height:  # the table leaves room below it
        return _charts_beside_table(area, choice, bottom, lists)
    names: tuple[PanelName, ...] = ("bars", *lists)
    return {"ranks": left, **_charts(right, choice), **dict(zip(names, _columns(bottom, len(names)), strict=True))}


def _panels_below_table(area: Region, choice: PanelChoice, above: Region | None) -> dict[str, Region]:
    """Return the panels below a short table: curves, then step bars, lateness and findings beside the log.

    ``above``: region of the findings beside the table; None: they stand among the panels below.
    """
    charts, bottom = area.split_horizontal((area.height + 1) // 2)
    loss, sync = _columns(charts, 2)
    left, right = _columns(bottom, 2)
    bars, rest = left.split_horizontal(min(choice.ranks + HEAD_LINES, max((left.height + 1) // 2, left.height - 9)))
    placed = {"loss": loss, "sync": sync, "bars": bars}
    if above is not None:
        alone = choice.ranks < 2 and choice.panel != "late"
        return placed | ({"bars": left} if alone else {"late": rest}) | {"findings": above, "log": right}
    if choice.ranks < 2 and choice.panel != "late":  # lateness compares ranks
        return placed | {"findings": rest, "log": right}
    lines = min(heat_lines(choice.ranks, rest.height), 2 * choice.ranks + HEAD_LINES)
    if rest.height - lines < LEAST_LIST_LINES:
        findings, log = right.split_horizontal(max(right.height // 3, LEAST_LIST_LINES))
        return placed | {"late": rest, "findings": findings, "log": log}
    late, findings = rest.split_horizontal(lines)
    return placed | {"late": late, "findings": findings, "log": right}


def _charts_beside_table(
    area: Region, choice: PanelChoice, bottom: Region, lists: tuple[PanelName, ...]
) -> dict[str, Region]:
    """Return table and step bars at the left, charts and ``lists`` at the right; the log below the bars if it fits."""
    left, right = _columns(area, 2)
    ranks, low = left.split_horizontal(choice.ranks + HEAD_LINES + 1)
    lines = bar_lines(choice.ranks, low.height)
    placed = {"ranks": ranks, "bars": low}
    if low.height - lines >= LEAST_LIST_LINES:
        placed["bars"], placed["log"] = low.split_horizontal(lines)
        lists = ("findings",)
    placed |= _charts(Region(right.x, area.y, right.width, bottom.y - area.y), choice)
    regions = _columns(Region(right.x, bottom.y, right.width, bottom.height), len(lists))
    return placed | dict(zip(lists, regions, strict=True))


def _charts(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Return two curves above the lateness map; the curves get the lines that the map cannot use."""
    late = heat_lines(choice.ranks, area.height // 3)
    curves, below = area.split_horizontal(area.height - late)
    loss, sync = curves.split_horizontal(round(curves.height / 2))
    return {"loss": loss, "sync": sync, "late": below}


def _table_height(area: Region, choice: PanelChoice, *, share: float) -> int:
    """Return the lines of a table above other panels: head, ranks and a blank line, at most ``share`` of the area."""
    return min(choice.ranks + HEAD_LINES + (1 if area.height >= 20 else 0), max(int(area.height * share), 5))


def _columns(area: Region, count: int) -> list[Region]:
    """Return an area cut into columns of about equal width with gaps between them."""
    usable = area.width - GAP_CELLS * (count - 1)
    edges = [round(usable * index / count) for index in range(count + 1)]
    return [
        Region(area.x + edges[i] + GAP_CELLS * i, area.y, edges[i + 1] - edges[i], area.height) for i in range(count)
    ]


class PlacedLayout(Layout):
    """Textual layout with a given region for each child, by its id."""

    name = "placing"

    def __init__(self) -> None:
        self.placed: dict[str, Region] = {}

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> ArrangeResult:
        return [
            WidgetPlacement(region, NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if (region := self.placed.get(child.id or "")) is not None
        ]


class PanelContainer(Widget):
    """Container that shows panels at given regions."""

    DEFAULT_CSS = """
    PanelContainer { height: 1fr; width: 1fr; padding: 0 1; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._placing = PlacedLayout()

    @property
    def layout(self) -> Layout:
        """Layout by regions, which replaces the style sheet's."""
        return self._placing

    def place(self, placed: dict[str, Region]) -> None:
        """Show the panels in ``placed`` at their regions, and hide the others."""
        if placed == self._placing.placed and all(child.display == (child.id in placed) for child in self.children):
            return
        self._placing.placed = placed
        for child in self.children:
            child.display = child.id in placed
        self.refresh(layout=True)
