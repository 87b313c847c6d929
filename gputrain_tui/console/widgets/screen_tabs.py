"""Top line of the screens without a run: the four screens as tabs."""

from __future__ import annotations

from textual.events import Click

from gputrain_tui.console.actions import ACTIONS
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, fit_row


class ScreenTabs(Canvas):
    """Tabs of the four screens with their keys; a click goes to the screen."""

    DEFAULT_CSS = """
    ScreenTabs { height: 1; dock: top; background: $panel; }
    """

    ALLOW_SELECT = False

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self._click_targets: list[tuple[int, int, str]] = []

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the line of tabs."""
        row: Row = [(" gputrain  ", "title")]
        self._click_targets = []
        at = 11
        for action in ACTIONS:
            if not action.name.startswith("go("):
                continue
            name = action.name.removeprefix("go('").removesuffix("')")
            self._click_targets.append((at, at + len(action.label) + 3, action.name))
            row += [
                (f" {action.key_text} ", "key"),
                (f"{action.label} ", "title" if name == self.place else "dim"),
            ]
            at += len(action.label) + 4
        return [fit_row(row, width)]

    async def on_click(self, event: Click) -> None:
        """Go to the clicked screen."""
        for begin, end, name in self._click_targets:
            if begin <= event.x < end:
                event.stop()
                await self.screen.run_action(f"app.{name}")
