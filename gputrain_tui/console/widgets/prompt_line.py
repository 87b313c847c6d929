"""Input line with a label."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Input, Static

from gputrain_tui.console.widgets.line_input import LineInput


class PromptLine(Horizontal):
    """Label and input; Tab calls ``action_commit`` of the screen, Enter posts ``Input.Submitted``."""

    DEFAULT_CSS = """
    PromptLine { height: 1; background: $surface; display: none; }
    PromptLine.-open { display: block; }
    PromptLine > #label { width: auto; max-width: 50%; padding: 0 1 0 0; color: $text-accent; }
    PromptLine > #editor { width: 1fr; height: 1; background: $surface; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "screen.commit(1)", "Commit", show=False),
        Binding("shift+tab", "screen.commit(-1)", "Commit", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Yield the label and the input."""
        yield Static(id="label", markup=False)
        yield LineInput(id="editor", compact=True)

    def open(self, label: str, text: str, hint: str) -> None:
        """Open the line with a label, a text to edit, and a hint to show while it is empty."""
        self.add_class("-open")
        self.query_one("#label", Static).update(label)
        editor = self.query_one(Input)
        editor.value = text
        editor.placeholder = hint
        editor.focus()

    def close(self) -> None:
        """Hide the line."""
        self.remove_class("-open")
