"""Terminal input without escape sequences in bracketed pastes: they would act as keys, which may launch or quit.

Textual's parser returns the characters after an unknown escape sequence as keys, even within a paste. Terminals differ
in the sequences that they remove from pastes themselves.
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


class PasteParser(XTermParser):
    """Parser of terminal input that strips escape sequences from pastes."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
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
    """Return a text split before a trailing escape sequence, which may go on in the next read."""
    at = text.rfind("\x1b", max(len(text) - len(END) + 1, 0))
    return (text, "") if at < 0 else (text[:at], text[at:])


class PasteDriver(LinuxDriver):
    """Linux driver that parses input by ``PasteParser``."""

    def run_input_thread(self) -> None:
        """Read and parse terminal input until the console ends."""
        parser = PasteParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        read_bytes = 4096  # bytes per read of the terminal
        wait_s = 0.1  # seconds to wait for input before a lone escape character counts as the Escape key
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(wait_s):
                    data = os.read(self.fileno, read_bytes)
                    if not data:
                        break  # the terminal was closed
                    if text := decode(data):
                        self._pass_on(parser.feed(text))
                self._pass_on(parser.tick())

    def _pass_on(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
