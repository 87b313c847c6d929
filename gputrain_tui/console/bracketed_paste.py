"""Strips escape sequences from bracketed pastes, which would otherwise pass for keys that launch or quit.

Textual's parser hands on what follows an escape character that it does not know as keys, also while a paste is on.
Terminals differ in what they take out of a paste themselves.
"""

from __future__ import annotations

import os
import re
import selectors
from codecs import getincrementaldecoder
from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

BEGIN, END = "\x1b[200~", "\x1b[201~"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~])?")
READ_BYTES = 4096
"""Bytes per read of the terminal."""
WAIT_S = 0.1
"""Seconds to wait for input before a lone escape character counts as the key."""


class PasteParser(XTermParser):
    """Terminal input parser that strips escape sequences from pastes."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasting = False
        self._before = ""
        """The newest characters outside a paste, whose begin mark may be split across reads."""
        self._held = ""
        """Possible beginning of the end mark."""

    def feed(self, data: str) -> Iterable[Message]:
        """Return the events of some input; the empty string marks its end."""
        plain = self._without_escapes(data)
        return super().feed(plain) if plain or not data else ()

    def _without_escapes(self, data: str) -> str:
        out: list[str] = []
        while data:
            if self._pasting:
                data, self._held = self._held + data, ""
                text, end, rest = data.partition(END)
                if not end:
                    text, self._held = _without_tail(text)
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


def _without_tail(text: str) -> tuple[str, str]:
    """Split off an escape sequence that may go on in the next read."""
    at = text.rfind("\x1b", max(len(text) - len(END) + 1, 0))
    return (text, "") if at < 0 else (text[:at], text[at:])


class PasteDriver(LinuxDriver):
    """Linux driver that reads the terminal through ``PasteParser``."""

    def run_input_thread(self) -> None:
        """Read the terminal until the console ends."""
        parser = PasteParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(WAIT_S):
                    data = os.read(self.fileno, READ_BYTES)
                    if not data:
                        break  # the terminal is gone
                    if text := decode(data):
                        self._pass_on(parser.feed(text))
                self._pass_on(parser.tick())

    def _pass_on(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
