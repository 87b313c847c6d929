"""Baseline of the console benchmarks: a Textual app of one line, changed by ``down`` and each second by a clock."""

from __future__ import annotations

from textual.app import App, ComposeResult
from textual.widgets import Static


class BareApp(App[None]):
    BINDINGS = [("down", "count", "Count"), ("q", "quit", "Quit")]  # noqa: RUF012 - as Textual declares it
    ENABLE_COMMAND_PALETTE = False

    presses = 0
    seconds = 0

    def compose(self) -> ComposeResult:
        yield Static(id="line")

    def on_mount(self) -> None:
        self.show()
        self.set_interval(1.0, self.tick)

    def tick(self) -> None:
        self.seconds += 1
        self.show()

    def action_count(self) -> None:
        self.presses += 1
        self.show()

    def show(self) -> None:
        self.query_one("#line", Static).update(f"press {self.presses}. second {self.seconds}. Quit")


if __name__ == "__main__":
    BareApp().run()
