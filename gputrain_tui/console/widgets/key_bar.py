"""Footer: the keys of a screen, from the action table; a click runs the action."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from textual import events

from gputrain_tui.console.actions import Action, footer, footer_of_focus
from gputrain_tui.console.widgets.canvas import Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row

SELECTED: Row = [
    (" text is selected   ", "label"), ("^c", "key"), (" Copy   ", "label"), ("esc", "key"), (" Deselect", "label"),
]  # fmt: skip


Piece = tuple[str, str, Action | None]
"""Text, role, and the action that a click on it runs."""


def draw_keys(actions: Sequence[Action], width: int) -> tuple[Row, list[tuple[int, int, Action]]]:
    """Return the line, and per action its cells: the first one, the one after the last, the action."""
    first_pinned_rank = 90  # first footer rank of the actions at the right, for which cells are always kept
    pinned = [_key(action) for action in actions if action.footer >= first_pinned_rank]
    rest = [action for action in actions if action.footer < first_pinned_rank]
    free = width - sum(map(_cells, pinned))
    last_sure_rank = 20  # last footer rank of the actions that are shortened rather than left out
    sure = [action for action in rest if action.footer <= last_sure_rank]
    folds = next((level for level in (0, 1) if sum(map(_cells, _keys(sure, level))) < free), 2)
    line: list[Piece] = [(" ", "base", None)]
    for key in _keys(rest, folds):
        line += key if _cells(line) + _cells(key) < free else []
    line.append((" " * max(free - _cells(line), 0), "base", None))
    for key in pinned:
        line += key if _cells(line) + _cells(key) <= width else []
    targets: list[tuple[int, int, Action]] = []
    at = 0
    for text, _, action in line:
        if action is not None:
            begin = targets.pop()[0] if targets and targets[-1][2] is action else at
            targets.append((begin, at + len(text), action))
        at += len(text)
    return [(text, role) for text, role, _ in line], targets


def _cells(pieces: Sequence[Piece]) -> int:
    return sum(len(text) for text, _, _ in pieces)


def _key(action: Action) -> list[Piece]:
    return [(action.key_text, "key", action), (f" {action.label}", "label", action), (" ", "base", action),
            (" ", "base", None)]  # fmt: skip


def _keys(actions: Sequence[Action], folds: int) -> list[list[Piece]]:
    """Return the keys of actions; the groups that fold at a level up to ``folds`` share one label."""
    keys: dict[str, list[Piece]] = {}
    for action in actions:
        if 0 < action.folds <= folds:
            keys[action.group] = _folded([other for other in actions if other.folds and other.group == action.group])
        else:
            keys[action.name] = _key(action)
    return list(keys.values())


def _folded(members: Sequence[Action]) -> list[Piece]:
    """Return the keys of a shortened group: consecutive digits as a range, others with blanks between them."""
    is_range = len(members) > 2 and "".join(action.key_text for action in members) in "123456789"
    pieces: list[Piece] = []
    for action in (members[0], members[-1]) if is_range else members:
        pieces += [("–" if is_range else " ", "label", None)] if pieces else []
        pieces.append((action.key_text, "key", action))
    return [*pieces, (f" {members[0].group}  ", "label", None)]


class KeyBar(Canvas):
    """Footer of a screen."""

    COMPONENT_CLASSES: ClassVar[set[str]] = role_classes("label")

    DEFAULT_CSS = """
    KeyBar {
        dock: bottom;
        height: 1;
        width: 1fr;
        background: $panel;
    }
    KeyBar > .canvas--label { color: $foreground 80%; }
    """

    ALLOW_SELECT = False

    def __init__(
        self, place: str, over: Callable[[], bool] = lambda: False, lacking: Callable[[], Collection[str]] = frozenset
    ) -> None:
        """Show the keys of the screen ``place`` of the action table.

        ``over`` returns whether the screen's run has ended, ``lacking`` the actions that cannot be done now.
        """
        super().__init__()
        self.place = place
        self.over = over
        self.lacking = lacking
        self._click_targets: list[tuple[int, int, Action]] = []

    def on_mount(self) -> None:
        """Redraw when the focus moves: a focused widget may have keys of its own."""
        self.watch(self.screen, "focused", self.redraw, init=False)

    def draw(self, width: int, height: int) -> list[Row]:
        if self.screen.selections:
            self._click_targets = []
            return [SELECTED]
        focused = getattr(self.screen.focused, "PLACE", None)
        over = self.over()
        actions = footer(self.place, over=over) if focused is None else footer_of_focus(self.place, focused, over=over)
        lacking = self.lacking()
        row, self._click_targets = draw_keys([action for action in actions if action.name not in lacking], width)
        return [row]

    async def on_click(self, event: events.Click) -> None:
        """Run the clicked action, on the focused widget if it is one of its own, else on the screen."""
        for begin, end, action in self._click_targets:
            if begin <= event.x < end:
                event.stop()
                focused = self.screen.focused
                own = focused is not None and getattr(focused, "PLACE", None) in action.places
                await (focused if own and focused is not None else self.screen).run_action(action.path)
                return
