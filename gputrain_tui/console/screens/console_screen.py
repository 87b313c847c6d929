"""Base of the console's screens: selecting text within one panel, and copying it."""

from __future__ import annotations

from collections.abc import Callable

from textual.errors import NoWidget
from textual.events import Key, MouseDown, MouseUp, Resize
from textual.geometry import Offset
from textual.screen import Screen
from textual.selection import Selection
from textual.timer import Timer
from textual.widget import Widget

from gputrain_tui.console.screens.app_protocol import app_of
from gputrain_tui.console.textual_internals import AbstractWidgetMeta
from gputrain_tui.console.widgets.canvas import Canvas, Copyable
from gputrain_tui.console.widgets.key_bar import KeyBar

SELECTION_S = 15.0
"""Seconds after which a selection ends by itself: a panel with selected text is not redrawn, and an accidental click
must not leave it with old values for long."""


class ConsoleScreen(Screen[None], metaclass=AbstractWidgetMeta):
    """Screen with panels of text that can be selected and copied."""

    _pressed: Canvas | None = None
    """The panel in which the mouse button was pressed, and to which a selection is confined."""
    _selection_timer: Timer | None = None

    # Selection

    def on_mouse_down(self, event: MouseDown) -> None:
        """Confine a selection to the panel in which it begins."""
        self._pressed = None
        widget, _ = self.get_widget_and_offset_at(*event.screen_offset)
        self._pressed = widget if isinstance(widget, Canvas) else None

    def on_mouse_up(self, event: MouseUp) -> None:
        self._pressed = None

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """Return the widget at a cell, and the offset in its text; a panel computes the offset itself."""
        try:
            widget = self._pressed if self._pressed is not None else self.get_widget_at(x, y)[0]
        except NoWidget:
            return None, None
        if not isinstance(widget, Canvas):
            return super().get_widget_and_offset_at(x, y)
        corner = widget.content_region.offset
        if self._pressed is None and not widget.is_text_at(y - corner.y):
            return None, None
        return widget, widget.text_offset(x - corner.x, y - corner.y)

    def watch_selections(self, selections: dict[Widget, Selection]) -> None:
        """Show the keys of a selection in the footer while there is one; end it after ``SELECTION_S``."""
        if self._selection_timer is not None:
            self._selection_timer.stop()
        self._selection_timer = self.set_timer(SELECTION_S, self.clear_selection) if selections else None
        for keys in self.query(KeyBar):
            keys.redraw()

    def key_escape(self, event: Key) -> None:
        """End a selection; the screen's own Escape does not run then."""
        if self.selections:
            event.stop()
            self.clear_selection()

    def on_resize(self, event: Resize) -> None:
        """End a selection: its lines have moved."""
        self.clear_selection()

    # Copy

    def action_copy_text(self) -> None:
        super().action_copy_text()
        self.clear_selection()

    def action_copy(self) -> None:
        """Copy the selection; else ``copyable`` of the focused panel; else ``copyable`` of the screen."""
        if self.selections:
            self.action_copy_text()
            return
        focused = self.focused.copyable() if isinstance(self.focused, Canvas) else None
        found = focused or self.copyable()
        if found is None:
            app_of(self).report("nothing to copy here; text that is selected with the mouse is copied by ctrl+c")
        else:
            app_of(self).copy(found.text, found.label)

    def copyable(self) -> Copyable | None:
        """Return the text for the copy key if the focused panel has none; None: nothing to copy."""
        return None

    def save_view(self) -> Callable[[], None]:
        """Return a function that restores the present view, for ``gg``: its first ``g`` is a key of its own."""
        return lambda: None
