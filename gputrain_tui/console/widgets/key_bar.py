"""Footer: the keys of a screen, from the action table; a click runs the action."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from textual import events

from gputrain_tui.console.actions import Action, footer, footer_of_focus
from gputrain_tui.console.widgets.canvas import Canvas, role_classes
from gputrain_tui.console.widgets.drawing import Row, row_cells

SELECTED: Row = [
    (" text is selected   ", "label"), ("^c", "key"), (" Copy   ", "label"), ("esc", "key"), (" Deselect", "label"),
]  # fmt: skip
"""The footer while text is selected."""


def draw_keys(actions: Sequence[Action], width: int) -> tuple[Row, list[tuple[int, int, Action]]]:
    """Return the line, and per action its cells: the first one, the one after the last, the action."""
    targets: list[tuple[int, int, Action]] = []
    first_pinned_rank = 90  # first footer rank of the actions at the right, for which room is always kept
    right = [action for action in actions if action.footer >= first_pinned_rank]
    rest = [action for action in actions if action.footer < first_pinned_rank]
    room = width - 1 - sum(_action_cells(action) for action in right)
    last_sure_rank = 20  # last footer rank of the actions that are shortened rather than left out
    sure = [action for action in rest if action.footer <= last_sure_rank]
    folds = next((level for level in (0, 1) if _needed_cells(sure, level) <= room), 2)
    row: Row = [(" ", "base")]
    done = set()
    for action in rest:
        if 0 < action.folds <= folds:
            members = _same_group(action, rest)
            if action.group not in done and row_cells(row) + _folded_cells(members) <= room:
                done.add(action.group)
                _append_folded(row, members, targets)
        elif row_cells(row) + _action_cells(action) <= room:
            _append_action(row, action, targets)
    gap = width - row_cells(row) - sum(_action_cells(action) for action in right)
    if gap > 0:
        row.append((" " * gap, "base"))
    for action in right:
        if row_cells(row) + _action_cells(action) <= width:
            _append_action(row, action, targets)
    return row, targets


def _same_group(action: Action, actions: Sequence[Action]) -> list[Action]:
    return [other for other in actions if other.folds and other.group == action.group]


def _needed_cells(actions: Sequence[Action], folds: int) -> int:
    """Return the cells that actions take if those that fold at a level up to ``folds`` are shortened."""
    plain = [action for action in actions if not 0 < action.folds <= folds]
    groups = {action.group: _same_group(action, actions) for action in actions if action not in plain}
    return sum(map(_action_cells, plain)) + sum(map(_folded_cells, groups.values()))


def _fold_keys(members: Sequence[Action]) -> list[Action | str]:
    """Return the keys of a shortened group: consecutive digits as a range, others with blanks between them."""
    if len(members) > 2 and "".join(action.key_text for action in members) in "123456789":
        return [members[0], "–", members[-1]]
    spaced: list[Action | str] = []
    for action in members:
        spaced += [*([" "] if spaced else []), action]
    return spaced


def _folded_cells(members: Sequence[Action]) -> int:
    keys = sum(len(key) if isinstance(key, str) else len(key.key_text) for key in _fold_keys(members))
    return keys + len(members[0].group) + 3


def _append_folded(row: Row, members: Sequence[Action], targets: list[tuple[int, int, Action]]) -> None:
    for key in _fold_keys(members):
        if isinstance(key, str):
            row.append((key, "label"))
        else:
            begin = row_cells(row)
            row.append((key.key_text, "key"))
            targets.append((begin, row_cells(row), key))
    row += [(f" {members[0].group}", "label"), ("  ", "base")]


def _action_cells(action: Action) -> int:
    return len(action.key_text) + len(action.label) + 3


def _append_action(row: Row, action: Action, targets: list[tuple[int, int, Action]]) -> None:
    begin = row_cells(row)
    row += [(action.key_text, "key"), (f" {action.label}", "label"), ("  ", "base")]
    targets.append((begin, row_cells(row) - 1, action))


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
        self,
        place: str,
        over: Callable[[], bool] = lambda: False,
        lacking: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Show the keys of a screen.

        Args:
            place: name of the screen in the action table.
            over: returns whether the screen's run has ended.
            lacking: returns the actions that cannot be done now.
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
        """Return the line of keys."""
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
