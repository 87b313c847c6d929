"""The last line of a screen: the keys that matter there, from the table of actions; a click does what the key does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from gputrain_tui.console.actions import Action, footer, footer_of_focus
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
    sure = [action for action in rest if action.footer <= SURE]
    folds = next((level for level in (0, 1) if _taken(sure, level) <= room), 2)
    row: Row = [(" ", "base")]
    done = set()
    for action in rest:
        if 0 < action.folds <= folds:
            like = _like(action, rest)
            if action.group not in done and length(row) + _wide_fold(like) <= room:
                done.add(action.group)
                _put_fold(row, like, spots)
        elif length(row) + _wide(action) <= room:
            _put(row, action, spots)
    gap = width - length(row) - sum(_wide(action) for action in right)
    if gap > 0:
        row.append((" " * gap, "base"))
    for action in right:
        if length(row) + _wide(action) <= width:
            _put(row, action, spots)
    return row, spots


def _like(action: Action, actions: Sequence[Action]) -> list[Action]:
    return [other for other in actions if other.folds and other.group == action.group]


def _taken(actions: Sequence[Action], folds: int) -> int:
    """Return the cells that actions take while so much of them is shortened."""
    plain = [action for action in actions if not 0 < action.folds <= folds]
    groups = {action.group: _like(action, actions) for action in actions if action not in plain}
    return sum(map(_wide, plain)) + sum(map(_wide_fold, groups.values()))


def _fold_keys(like: Sequence[Action]) -> list[Action | str]:
    """Return the keys of a group as they are written: digits that follow each other as a range."""
    if len(like) > 2 and "".join(action.key_text for action in like) in "123456789":
        return [like[0], "–", like[-1]]
    spaced: list[Action | str] = []
    for action in like:
        spaced += [*([" "] if spaced else []), action]
    return spaced


def _wide_fold(like: Sequence[Action]) -> int:
    keys = sum(len(key) if isinstance(key, str) else len(key.key_text) for key in _fold_keys(like))
    return keys + len(like[0].group) + 3


def _put_fold(row: Row, like: Sequence[Action], spots: list[tuple[int, int, Action]]) -> None:
    for key in _fold_keys(like):
        if isinstance(key, str):
            row.append((key, "label"))
        else:
            begin = length(row)
            row.append((key.key_text, "key"))
            spots.append((begin, length(row), key))
    row += [(f" {like[0].group}", "label"), ("  ", "base")]


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

    def on_mount(self) -> None:
        """Show other keys when something else takes them."""
        self.watch(self.screen, "focused", self._show_keys, init=False)

    def _show_keys(self) -> None:
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return the line of keys."""
        width = self.size.width
        focused = getattr(self.screen.focused, "PLACE", None)
        actions = footer(self.place) if focused is None else footer_of_focus(self.place, focused)
        row, self._spots = draw_keys(actions, width)
        styles = {name: self.get_component_rich_style(f"key-bar--{name}") for name in ("key", "label")}
        segments = [Segment(text, styles.get(role, self.rich_style)) for text, role in row]
        return Strip(segments).adjust_cell_length(width, self.rich_style)

    async def on_click(self, event: events.Click) -> None:
        """Do what stands under the pointer."""
        for begin, end, action in self._spots:
            if begin <= event.x < end:
                event.stop()
                focused = self.screen.focused
                own = focused is not None and getattr(focused, "PLACE", None) in action.places
                await (focused if own and focused is not None else self.screen).run_action(action.path)
                return
