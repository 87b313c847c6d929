"""The last line of a screen: the keys that matter there, from the table of actions; a click does what the key does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from gputrain_tui.console.actions import Action, footer
from gputrain_tui.console.widgets.drawing import Row, length

SURE = 20
"""Actions up to this place are there in any case: where they do not fit in full, those that may are shortened."""
ALWAYS = 90
"""Actions from this place in the footer stand at the right and stay when there is little room."""


def draw_keys(actions: Sequence[Action], width: int) -> tuple[Row, list[tuple[int, int, Action]]]:
    """Return the line, and where on it each action stands: first cell, cell after the last, action."""
    spots: list[tuple[int, int, Action]] = []
    right = [action for action in actions if action.footer >= ALWAYS]
    rest = [action for action in actions if action.footer < ALWAYS]
    room = width - 1 - sum(_wide(action) for action in right)
    folded = sum(_wide(action) for action in rest if action.footer <= SURE) > room
    row: Row = [(" ", "base")]
    done = set()
    for action in rest:
        like = [a for a in rest if a.folds and a.group == action.group] if folded and action.folds else []
        if like:
            wide = sum(len(a.key_text) + 1 for a in like) + len(action.group) + 2
            if action.group not in done and length(row) + wide <= room:
                done.add(action.group)
                for a in like:
                    begin = length(row)
                    row += [(a.key_text, "key"), (" ", "base")]
                    spots.append((begin, length(row) - 1, a))
                row += [(action.group, "label"), ("  ", "base")]
        elif length(row) + _wide(action) <= room:
            _put(row, action, spots)
    gap = width - length(row) - sum(_wide(action) for action in right)
    if gap > 0:
        row.append((" " * gap, "base"))
    for action in right:
        if length(row) + _wide(action) <= width:
            _put(row, action, spots)
    return row, spots


def _wide(action: Action) -> int:
    return len(action.key_text) + len(action.label) + 3


def _put(row: Row, action: Action, spots: list[tuple[int, int, Action]]) -> None:
    begin = length(row)
    row += [(action.key_text, "key"), (f" {action.label}", "label"), ("  ", "base")]
    spots.append((begin, length(row) - 1, action))


class KeyBar(Widget):
    """The footer of a screen."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-bar--key", "key-bar--label"}

    DEFAULT_CSS = """
    KeyBar {
        dock: bottom;
        height: 1;
        width: 1fr;
        background: $panel;
    }
    KeyBar > .key-bar--key { color: $text-accent; text-style: bold; }
    KeyBar > .key-bar--label { color: $foreground 80%; }
    """

    def __init__(self, place: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.place = place
        self._spots: list[tuple[int, int, Action]] = []

    def render_line(self, y: int) -> Strip:
        """Return the line of keys."""
        width = self.size.width
        row, self._spots = draw_keys(footer(self.place), width)
        styles = {name: self.get_component_rich_style(f"key-bar--{name}") for name in ("key", "label")}
        segments = [Segment(text, styles.get(role, self.rich_style)) for text, role in row]
        return Strip(segments).adjust_cell_length(width, self.rich_style)

    async def on_click(self, event: events.Click) -> None:
        """Do what stands under the pointer."""
        for begin, end, action in self._spots:
            if begin <= event.x < end:
                event.stop()
                await self.screen.run_action(action.path)
                return
