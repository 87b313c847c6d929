"""All that the console takes of Textual's internals, which a release may change without notice.

No other module uses a private name of Textual; ``tests/integration/test_textual_internals.py`` compares what is
assumed here with the installed version.
"""

from __future__ import annotations

import os
import selectors
from abc import ABCMeta
from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

from textual._slug import TrackedSlugs
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.message_pump import _MessagePumpMeta

from gputrain_tui.console.bracketed_paste import PasteFilter

READ_BYTES = 4096
"""Bytes per read of the terminal."""
WAIT_S = 0.1
"""Seconds to wait for input before a lone escape character counts as the Escape key."""


def heading_anchor(heading: str) -> str:
    """Return the anchor of a heading for ``Markdown.goto_anchor``, if no heading above it has the same text."""
    return TrackedSlugs().slug(heading)


def write_to_terminal(app: App[Any], text: str) -> None:
    """Write a control sequence to the terminal, between two frames; nothing if the app has none."""
    if app._driver is not None:
        app._driver.write(text)
        app._driver.flush()


class PasteParser(XTermParser):
    """Parser of terminal input that strips escape sequences from pastes."""

    def __init__(self) -> None:
        super().__init__()
        self.paste_filter = PasteFilter()

    def feed(self, data: str) -> Iterable[Message]:
        """Return the events of some input; the empty string marks the end of all input."""
        plain = self.paste_filter.plain(data)
        return super().feed(plain) if plain or not data else ()


class PasteDriver(LinuxDriver):
    """Linux driver that parses input by ``PasteParser``."""

    def run_input_thread(self) -> None:
        parser = PasteParser()
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(WAIT_S):
                    data = os.read(self.fileno, READ_BYTES)
                    if not data:
                        break  # the terminal was closed
                    if text := decode(data):
                        self._pass_on(parser.feed(text))
                self._pass_on(parser.tick())

    def _pass_on(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)


def paste_driver(default: type[Driver]) -> type[Driver]:
    """Return ``PasteDriver`` in place of the Linux driver, and any other driver as it is."""
    return PasteDriver if default is LinuxDriver else default


class AbstractWidgetMeta(_MessagePumpMeta, ABCMeta):
    """Metaclass of widgets and screens with abstract methods."""
