"""Every key of a screen, from the table of actions."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from gputrain_tui.console.actions import groups, of_place

MOVING = {
    "run": (
        ("↑ ↓", "Move through the table, the findings or the log"),
        ("⇥", "Give the keys to the next panel"),
        ("click", "Take a rank; on a title sort by it; twice open the rank"),
    ),
    "rank": (("⇥", "Give the keys to the next panel"),),
}
"""Keys of widgets, which are not actions of the screen."""
WITH_LOG = ("run", "rank")
"""Screens with a log, whose keys hold while it has them."""


class HelpScreen(ModalScreen[None]):
    """The keys of the screen below."""

    PLACE = "help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "leave", "Close"),
    ]

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def compose(self) -> ComposeResult:
        """Yield the list."""
        with VerticalScroll(id="help"):
            yield Static(help_text(self._place), id="keys")

    def on_mount(self) -> None:
        """Name the screen on the frame."""
        frame = self.query_one("#help")
        frame.border_title = f"keys of the {self._place} screen" if self._place != "app" else "keys"
        frame.border_subtitle = "esc closes"
        frame.focus()

    def action_leave(self) -> None:
        """Close it."""
        self.dismiss()


def help_text(place: str) -> Text:
    """Return the keys under their headings."""
    text = Text()
    found = groups(place)
    if place in WITH_LOG:
        found = {**found, "Log": of_place("log")}
    wide = max((len(_keys(action.keys, action.key_text)) for group in found.values() for action in group), default=0)
    moving = MOVING.get(place, ())
    wide = max([wide, *(len(keys) for keys, _ in moving)])
    if moving:
        text.append("Moving\n", "bold")
        for keys, what in moving:
            text.append(f"  {keys.ljust(wide)}  ", "bold")
            text.append(f"{what}\n")
    for heading, actions in found.items():
        text.append(f"{chr(10) if text else ''}{heading}\n", "bold")
        for action in actions:
            text.append(f"  {_keys(action.keys, action.key_text).ljust(wide)}  ", "bold")
            text.append(f"{action.description}\n")
    text.rstrip()
    return text


def _keys(keys: tuple[str, ...], first: str) -> str:
    return first if len(keys) == 1 else f"{first} {' '.join(keys[1:])}"
