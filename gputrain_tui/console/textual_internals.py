"""All that the console takes of Textual's internals, which a release may change without notice.

No other module uses a private name of Textual; ``tests/integration/test_textual_internals.py`` compares what is
assumed here with the installed version.
"""

from __future__ import annotations

import os
import re
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

BEGIN, END = "\x1b[200~", "\x1b[201~"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~])?")


class PasteParser(XTermParser):
    """Parser of terminal input, which comes in portions, without escape sequences in bracketed pastes.

    Textual's parser returns the characters after an unknown escape sequence as keys, even within a paste: they may
    launch or quit. Terminals differ in the sequences that they remove from pastes themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pasting = False
        self._before = ""
        """Last characters outside a paste: its begin mark may be split across reads."""
        self._held = ""
        """Held-back end of the data within a paste: an escape sequence or end mark that may go on in the next read."""

    def feed(self, data: str) -> Iterable[Message]:
        """Return the events of some input; the empty string marks the end of all input."""
        plain = self._without_escapes(data)
        return super().feed(plain) if plain or not data else ()

    def _without_escapes(self, data: str) -> str:
        """Return a portion without the escape sequences of pastes, and without what is held back for the next one."""
        out: list[str] = []
        while data:
            if self._pasting:
                data, self._held = self._held + data, ""
                text, end, rest = data.partition(END)
                if not end:  # an escape sequence at the end may go on in the next read
                    at = text.rfind("\x1b", max(len(text) - len(END) + 1, 0))
                    text, self._held = (text, "") if at < 0 else (text[:at], text[at:])
                out += [ESCAPES.sub("", text), end]
                self._pasting = not end
            else:
                at = (self._before + data).find(BEGIN)
                cut = at + len(BEGIN) - len(self._before) if at >= 0 else len(data)
                out.append(data[:cut])
                rest = data[cut:]
                self._pasting = at >= 0
                self._before = "" if at >= 0 else (self._before + data)[1 - len(BEGIN) :]
            data = rest
        return "".join(out)


def heading_anchor(heading: str) -> str:
    """Return the anchor of a heading for ``Markdown.goto_anchor``, if no heading above it has the same text."""
    return TrackedSlugs().slug(heading)


def write_to_terminal(app: App[Any], text: str) -> None:
    """Write a control sequence to the terminal, between two frames; nothing if the app has none."""
    if app._driver is not None:
        app._driver.write(text)
        app._driver.flush()


class PasteDriver(LinuxDriver):
    """Linux driver that parses input by ``PasteParser``."""

    def run_input_thread(self) -> None:
        parser = PasteParser()
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(0.1):  # seconds until a lone escape character counts as the Escape key
                    data = os.read(self.fileno, 4096)
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
