"""Confirmation dialog before an action."""

from __future__ import annotations

from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from gputrain_tui.console.screens.console_screen import AppProtocol

LEAST_KEY_GAP_S = 0.1
"""Least seconds between a yes and the key before it: the keys of a paste are closer together."""


class Confirm(ModalScreen[bool]):
    """Yes-or-no dialog; the focus is on no.

    Yes counts only after a moment without keys: pasted text that ends a bracketed paste early arrives as keys, and
    must not both open the dialog and answer it.
    """

    PLACE = "confirm"
    AUTO_FOCUS = "#no"  # Enter alone changes nothing
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, consequence: str, *, yes: str) -> None:
        super().__init__()
        self._question = question
        self._consequence = consequence
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(self._question, id="question", markup=False)
            yield Static(self._consequence, id="consequence", markup=False)
            with Horizontal(id="answers"):
                yield Button(f"{self._yes} (y)", id="yes", variant="error", compact=True)
                yield Button("Leave it (n)", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_answer(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """Close the dialog with an answer; a yes that follows another key within ``LEAST_KEY_GAP_S`` does not count."""
        console = cast(AppProtocol, self.app)
        if yes and console.quiet_s < LEAST_KEY_GAP_S:
            console.report("ignored: the answer came too soon after another key; press it again")
        else:
            self.dismiss(yes)
