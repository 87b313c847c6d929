"""Help screen: keys of a screen, and the topics of the help."""

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
from textual.widgets import Markdown, Static

from gputrain_tui.console.actions import groups, of_place
from gputrain_tui.console.textual_internals import heading_anchor
from gputrain_tui.help_topics import ORDER, read_topic
from gputrain_tui.plain_markdown import tables_as_code

MOVING = {
    "run": (
        ("↑ ↓ k j", "Move through the table, the findings or the log"),
        ("home end G", "Go to the first or last line"),
        ("⇥", "Focus the next panel"),
        ("click", "Select a rank (twice: open it); on a title, sort by it"),
    ),
    "stacks": (("↑ ↓ k j", "Scroll the stacks"), ("home end G", "Go to the first or last line")),
    "rank": (
        ("↑ ↓ k j", "Scroll the stack or the log"),
        ("home end G", "Go to the first or last line"),
        ("⇥", "Focus the next panel"),
    ),
    **dict.fromkeys(
        ("cluster", "launch", "history", "compare"),
        (
            ("↑ ↓ k j", "Move through the list"),
            ("pgup pgdn", "Move by a page"),
            ("home end G", "Go to the first or last line"),
        ),
    ),
}
WIDTH_CELLS = 94
"""Cells of the widest window, as in the style sheet."""
WITH_LOG = ("run", "rank")
"""Screens with a log; its keys work while it has the focus."""


TOPICS = {
    "run": "numbers", "rank": "numbers", "compare": "numbers", "findings": "findings", "stacks": "findings",
    "hardware": "gpus", "log": "record", "cluster": "gpus", "launch": "recipe",
    "history": "record",
}  # fmt: skip
"""Topic of the help by screen, or by the id of the focused panel of a run."""


class HelpScreen(ModalScreen[None]):
    """Dialog with the keys of the screen below; beside them, a page for each topic, that of the screen first."""

    PLACE = "help"
    AUTO_FOCUS = "#help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1,enter", "leave", "Close"),
        Binding("right,tab,l", "turn(1)", "Next page", show=False),
        Binding("left,shift+tab,h", "turn(-1)", "Previous page", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("G", "edge(1)", "Last", show=False),
    ]

    def __init__(self, place: str, topic: str = "", heading: str = "") -> None:
        """Make the dialog for the screen ``place``; its second page is ``topic``, opened at ``heading``."""
        super().__init__()
        self._place = place
        first = topic or TOPICS.get(place, "recipe")
        self._pages = ("", first, *(name for name in ORDER if name not in (first, "developers", "changelog")))
        """The pages: the keys, then the topics."""
        self._page = 0
        self._heading = heading
        self._shown = ("", 0)
        """Topic and width of the Markdown that is shown."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(id="keys")
            yield Markdown(id="topic", open_links=False)

    def on_mount(self) -> None:
        self._show_titles()
        self.query_one("#topic").display = False

    def _show_titles(self) -> None:
        frame, topic = self.query_one("#help"), self._pages[self._page]
        following = self._pages[(self._page + 1) % len(self._pages)]
        if topic:
            frame.border_title = f"help: {topic}"
            frame.border_subtitle = f"{f'→ {following}   ' if following else ''}← back   esc closes"
        else:
            frame.border_title = f"keys of the {self._place} screen" if self._place != "app" else "keys"
            frame.border_subtitle = f"→ help: {following}   esc closes"

    async def on_resize(self, event: Resize) -> None:
        self.query_one("#keys", Static).update(help_text(self._place, self._text_cells()))
        await self._show_topic()

    def _text_cells(self) -> int:
        return min(self.size.width, WIDTH_CELLS) - 8  # border, padding and scroll bar

    async def action_turn(self, pages: int) -> None:
        """Turn to another page: the keys, then each topic; past the last one to the keys."""
        self._page = (self._page + pages) % len(self._pages)
        self._show_titles()
        topic = self.query_one("#topic", Markdown)
        self.query_one("#keys").display = not self._pages[self._page]
        topic.display = bool(self._pages[self._page])
        self.query_one("#help").scroll_home(animate=False)
        await self._show_topic()
        if self._page == 1 and self._heading:
            self.call_after_refresh(topic.goto_anchor, heading_anchor(self._heading))

    async def _show_topic(self) -> None:
        least_cells = 20  # a line of code has space for its indentation and a word, however small the terminal is
        name, width = self._pages[self._page], max(self._text_cells() - 6, least_cells)  # Textual indents code
        if name and (name, width) != self._shown:
            self._shown = name, width
            await self.query_one("#topic", Markdown).update(tables_as_code(read_topic(name).markdown, width))

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        name = event.href.partition("#")[0].removesuffix(".md")
        if name in self._pages:
            self.run_worker(self.action_turn(self._pages.index(name) - self._page))

    def action_scroll(self, lines: int) -> None:
        self.query_one("#help").scroll_relative(y=lines, animate=False)

    def action_edge(self, side: int) -> None:
        frame = self.query_one("#help")
        frame.scroll_to(y=0 if side < 0 else frame.max_scroll_y, animate=False)

    def action_leave(self) -> None:
        self.dismiss()


def help_text(place: str, width: int = WIDTH_CELLS) -> Text:
    """Return the keys by heading, wrapped at ``width``."""
    text = Text()
    by_group = groups(place)
    everywhere = by_group.pop("Screens")
    if place in WITH_LOG:
        by_group["Log, while focused"] = of_place("log")
    by_group["Screens"] = everywhere  # the actions of every screen come last
    moving = MOVING.get(place, ())
    listed = [("Moving", moving)] if moving else []
    for heading, actions in by_group.items():
        listed.append((heading, tuple((action.key_texts, action.description) for action in actions)))
    _append(text, listed, width)
    text.rstrip()
    return text


def _append(text: Text, listed: Sequence[tuple[str, Sequence[tuple[str, str]]]], width: int) -> None:
    name_cells = max((len(name) for _, rows in listed for name, _ in rows), default=0)
    for heading, rows in listed:
        text.append(f"{chr(10) if text else ''}{heading}\n", "bold")
        for name, description in rows:
            first, *rest = textwrap.wrap(description, max(width - name_cells - 4, 16))
            text.append(f"  {name.ljust(name_cells)}  ", "bold")
            text.append("".join(f"{line}\n" for line in (first, *(" " * (name_cells + 4) + more for more in rest))))
