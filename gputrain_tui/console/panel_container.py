"""Arranges the panels of a run by the terminal's size, the number of ranks and the chosen panel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget

from gputrain_tui.console.widgets.lateness_map import heat_lines
from gputrain_tui.console.widgets.step_bars import bar_lines

PanelName = Literal["ranks", "loss", "sync", "bars", "late", "findings", "log"]
PANELS: tuple[PanelName, ...] = ("ranks", "loss", "sync", "bars", "late", "findings", "log")
"""The panels in the order in which a key goes through them."""
GRID_HEAD = 2
"""Lines of the rank table besides the ranks."""
ARRIVING = 8
"""Lines of the view of who has come besides the hosts."""
TALK = 5
"""Lines with which a list of findings or a log begins to be of use."""
GAP = 2
"""Cells between two columns of panels."""


@dataclass(frozen=True, kw_only=True)
class PanelChoice:
    """What is to be shown."""

    ranks: int
    panel: PanelName = "loss"
    """What the person asked for last."""
    right: PanelName = "findings"
    """Of the panels that share a place in the middle-sized layout, the one to show."""
    zoomed: bool = False
    """Whether one panel has everything."""
    joining: bool = False
    """Whether the first step has not been made yet: charts would be empty."""
    hosts: int = 1
    """Machines of the run: who is awaited takes a line for each."""
    card: int = 0
    """Lines that the culprit card wants; 0: nothing failed."""


def kind(width: int, height: int) -> Literal["narrow", "medium", "wide"]:
    """Return which of three layouts fits."""
    if width < 96 or height < 28:
        return "narrow"
    return "wide" if width >= 160 and height >= 44 else "medium"


def arrange(width: int, height: int, choice: PanelChoice) -> dict[str, Region]:
    """Return the panels that are shown and where; they never overlap, and leave no row unused."""
    if width < 1 or height < 1:
        return {}
    if choice.zoomed:
        return {choice.panel: Region(0, 0, width, height)}
    placed: dict[str, Region] = {}
    area = Region(0, 0, width, height)
    if choice.card:
        card = min(choice.card, max(height // 2, 3))
        placed["culprit"], area = area.split_horizontal(card)
    layout = {"narrow": _narrow, "medium": _medium, "wide": _wide}[kind(width, height)]
    placed |= layout(area, choice)
    return {name: region for name, region in placed.items() if region.width > 0 and region.height > 0}


def _narrow(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """The table and one panel below it."""
    if choice.panel == "ranks" or area.height < 8:
        return {"ranks": area}
    top, below = area.split_horizontal(_grid_height(area, choice, share=0.45))
    return {"ranks": top, _one(choice): below}


def _one(choice: PanelChoice) -> str:
    if choice.joining and choice.panel in ("loss", "sync", "bars", "late"):
        return "joining"
    return choice.panel


def _medium(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Table and charts, and one of findings and log where there is no room for both."""
    return _above(area, choice) or _aside(area, choice, max(area.height // 4, 6), (choice.right,))


def _wide(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """All panels."""
    return _above(area, choice) or _aside(area, choice, max(area.height // 4, 8), ("findings", "log"))


def _above(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """The whole table above everything else; nothing where it does not fit there."""
    if not _few(area, choice):
        return {}
    top, rest = area.split_horizontal(_grid_height(area, choice, share=0.34))
    if not choice.joining:
        return {"ranks": top, **_below(rest, choice)}
    joining, log = _columns(rest, 2)
    return {"ranks": top, "joining": joining, "log": log}


def _aside(area: Region, choice: PanelChoice, low: int, told: tuple[PanelName, ...]) -> dict[str, Region]:
    """The table beside the charts, and below both, in ``low`` lines, composition and what was told."""
    upper, bottom = area.split_horizontal(area.height - low)
    left, right = _columns(upper, 2)
    if choice.joining:
        return _arriving(area, choice)
    if _has_room(upper, choice):
        return _beside(area, choice, bottom, told)
    names: tuple[PanelName, ...] = ("bars", *told)
    return {"ranks": left, **_charts(right, choice), **dict(zip(names, _columns(bottom, len(names)), strict=True))}


def _below(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Under a table of few ranks the charts; then composition, lateness and findings at the left, the log beside."""
    charts, bottom = area.split_horizontal((area.height + 1) // 2)
    loss, sync = _columns(charts, 2)
    left, right = _columns(bottom, 2)
    bars, rest = left.split_horizontal(min(choice.ranks + GRID_HEAD, max((left.height + 1) // 2, left.height - 9)))
    placed = {"loss": loss, "sync": sync, "bars": bars}
    if choice.ranks < 2 and choice.panel != "late":  # nobody to be late for
        return placed | {"findings": rest, "log": right}
    lines = min(heat_lines(choice.ranks, rest.height), 2 * choice.ranks + GRID_HEAD)
    if rest.height - lines < TALK:
        findings, log = right.split_horizontal(max(right.height // 3, TALK))
        return placed | {"late": rest, "findings": findings, "log": log}
    late, findings = rest.split_horizontal(lines)
    return placed | {"late": late, "findings": findings, "log": right}


def _has_room(area: Region, choice: PanelChoice) -> bool:
    """Return whether a table beside the charts would leave room below it."""
    return choice.ranks + GRID_HEAD + 4 <= area.height


def _beside(area: Region, choice: PanelChoice, bottom: Region, told: tuple[PanelName, ...]) -> dict[str, Region]:
    """Table and composition at the left, charts at the right, what was told below the charts, the log where room is."""
    left, right = _columns(area, 2)
    ranks, low = left.split_horizontal(choice.ranks + GRID_HEAD + 1)
    lines = bar_lines(choice.ranks, low.height)
    placed = {"ranks": ranks, "bars": low}
    if low.height - lines >= TALK:
        placed["bars"], placed["log"] = low.split_horizontal(lines)
        told = ("findings",)
    placed |= _charts(Region(right.x, area.y, right.width, bottom.y - area.y), choice)
    regions = _columns(Region(right.x, bottom.y, right.width, bottom.height), len(told))
    return placed | dict(zip(told, regions, strict=True))


def _charts(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """Two curves and the lateness of all ranks below each other; what lateness cannot use is the curves'."""
    late = heat_lines(choice.ranks, area.height // 3)
    curves, below = area.split_horizontal(area.height - late)
    loss, sync = _rows(curves, 2)
    return {"loss": loss, "sync": sync, "late": below}


def _arriving(area: Region, choice: PanelChoice) -> dict[str, Region]:
    """The table beside who is awaited, and what is printed meanwhile."""
    left, right = _columns(area, 2)
    joining, log = right.split_horizontal(min(choice.hosts + ARRIVING, (right.height + 1) // 2))
    return {"ranks": left, "joining": joining, "log": log}


def _few(area: Region, choice: PanelChoice) -> bool:
    """Return whether the whole table fits above the charts."""
    return choice.ranks + GRID_HEAD <= max(area.height * 0.34, 6)


def _grid_height(area: Region, choice: PanelChoice, *, share: float) -> int:
    """Return the lines of a table above other panels: what it needs and a blank one, within its share."""
    return min(choice.ranks + GRID_HEAD + (1 if area.height >= 20 else 0), max(int(area.height * share), 5))


def _columns(area: Region, count: int) -> list[Region]:
    """Cut an area into columns of about equal width with a gap between them."""
    usable = area.width - GAP * (count - 1)
    edges = [round(usable * index / count) for index in range(count + 1)]
    return [Region(area.x + edges[i] + GAP * i, area.y, edges[i + 1] - edges[i], area.height) for i in range(count)]


def _rows(area: Region, count: int) -> list[Region]:
    """Cut an area into rows of about equal height."""
    edges = [round(area.height * index / count) for index in range(count + 1)]
    return [Region(area.x, area.y + edges[i], area.width, edges[i + 1] - edges[i]) for i in range(count)]


class PlacedLayout(Layout):
    """Places children by their ids; those that are not named are not shown."""

    name = "placing"

    def __init__(self) -> None:
        self.placed: dict[str, Region] = {}

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> ArrangeResult:
        """Return where each child stands."""
        return [
            WidgetPlacement(region, NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if (region := self.placed.get(child.id or "")) is not None
        ]


class PanelContainer(Widget):
    """Holds panels that stand where a pure function says."""

    DEFAULT_CSS = """
    PanelContainer { height: 1fr; width: 1fr; padding: 0 1; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._placing = PlacedLayout()

    @property
    def layout(self) -> Layout:
        """Not one of the style sheet's layouts."""
        return self._placing

    def place(self, placed: dict[str, Region]) -> None:
        """Show the named panels where they are to stand, and hide the others."""
        if placed == self._placing.placed and all(child.display == (child.id in placed) for child in self.children):
            return
        self._placing.placed = placed
        for child in self.children:
            child.display = child.id in placed
        self.refresh(layout=True)
