"""Help screen: keys of a screen, and the meaning of its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static

from gputrain_tui.console.actions import groups, of_place

MOVING = {
    "run": (
        ("↑ ↓ k j", "Move through the table, the findings or the log"),
        ("gg G", "Go to the first or last line (home, end); g alone is Sync"),
        ("⇥", "Focus the next panel"),
        ("click", "Select a rank (twice: open it); on a title, sort by it"),
    ),
    "rank": (
        ("↑ ↓ k j", "Scroll the stack or the log"),
        ("gg G", "Go to the first or last line"),
        ("⇥", "Focus the next panel"),
    ),
    **dict.fromkeys(
        ("cluster", "launch", "history", "compare"),
        (
            ("↑ ↓ k j", "Move through the list"),
            ("pgup pgdn", "Move by a page"),
            ("home end gg G", "Go to the first or last line"),
        ),
    ),
}
"""Keys of widgets by screen; they are no actions of the screen."""
FIGURES = (
    ("✓ ▲ ✗", "No findings; a warning; a critical finding or a failure"),
    ("compute", "Share of a step in forward, backward and optimizer; the rest is waiting"),
    (
        "sync wait",
        "Time a rank waited for gradients, not hidden by the backward pass: in ms, or as a share of its steps",
    ),
    ("late ms", "How much later than the first rank it reached the synchronisation: the others waited that long"),
    ("loss", "Mean over the samples, in the task's unit; valid: exact over all ranks, at the newest evaluation"),
    ("smp/s", "Samples per second of the rank, over its last steps; in the header, of all ranks"),
    ("g.norm g.own", "Norm of the gradient after the reduction, and of the rank's own gradient before it"),
    ("data fwd bwd opt", "Phases of the newest step: waiting for data, forward, backward, optimizer, in ms"),
    ("mem use", "Memory in GiB and use in %: of its GPU; without one, of the process, 100 % being one core"),
    ("band", "A chart's bright line is the median of all ranks, the area spans their minimum to maximum"),
    ("▴ in a chart", "A spike beyond the top, cropped so that usual values stay readable; log scale shows it all"),
)
"""Figures and marks on the screens of a run, with their meaning."""
WIDTH_CELLS = 94
"""Cells of the widest window, as in the style sheet."""
FRAME_CELLS = 8
"""Cells of the window's border, padding and scroll bar."""
WITH_LOG = ("run", "rank")
"""Screens with a log; its keys work while it has the focus."""


class HelpScreen(ModalScreen[None]):
    """Dialog with the keys of the screen below."""

    PLACE = "help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "leave", "Close"),
        Binding("k", "scroll(-1)", "Up", show=False),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("G", "edge(1)", "Last", show=False),
    ]

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def compose(self) -> ComposeResult:
        """Yield the scrolled list of keys."""
        with VerticalScroll(id="help"):
            yield Static(id="keys")

    def on_mount(self) -> None:
        """Set the frame's titles, and focus it."""
        frame = self.query_one("#help")
        frame.border_title = f"keys of the {self._place} screen" if self._place != "app" else "keys"
        frame.border_subtitle = "↓ what the figures mean   esc closes" if self._place in WITH_LOG else "esc closes"
        frame.focus()

    def on_resize(self, event: Resize) -> None:
        """Wrap the descriptions at the new width."""
        self.query_one("#keys", Static).update(help_text(self._place, min(event.size.width, WIDTH_CELLS) - FRAME_CELLS))

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines."""
        self.query_one("#help").scroll_relative(y=lines, animate=False)

    def action_edge(self, side: int) -> None:
        """Go to the first or the last line."""
        frame = self.query_one("#help")
        frame.scroll_to(y=0 if side < 0 else frame.max_scroll_y, animate=False)

    def action_leave(self) -> None:
        """Close the help."""
        self.dismiss()


def help_text(place: str, width: int = WIDTH_CELLS) -> Text:
    """Return the keys by heading, wrapped at ``width``."""
    text = Text()
    found = dict(groups(place))
    if place in WITH_LOG:
        found["Log"] = of_place("log")
    found["Screens"] = found.pop("Screens")  # the actions of every screen come last
    moving = MOVING.get(place, ())
    listed = [("Moving", moving)] if moving else []
    for heading, actions in found.items():
        name = "Log, while focused" if heading == "Log" else heading
        listed.append((name, tuple((action.key_texts, action.description) for action in actions)))
    _append(text, listed, width)
    if place in WITH_LOG:
        _append(text, [("What the figures mean", FIGURES)], width)
    text.rstrip()
    return text


def _append(text: Text, listed: Sequence[tuple[str, Sequence[tuple[str, str]]]], width: int) -> None:
    """Append headings with their rows, in two columns."""
    name_cells = max((len(name) for _, rows in listed for name, _ in rows), default=0)
    for heading, rows in listed:
        text.append(f"{chr(10) if text else ''}{heading}\n", "bold")
        for name, description in rows:
            first, *rest = textwrap.wrap(description, max(width - name_cells - 4, 16))
            text.append(f"  {name.ljust(name_cells)}  ", "bold")
            text.append("".join(f"{line}\n" for line in (first, *(" " * (name_cells + 4) + more for more in rest))))
