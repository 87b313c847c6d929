"""Terminal input without escape sequences in bracketed pastes: they would act as keys, which may launch or quit.

Textual's parser returns the characters after an unknown escape sequence as keys, even within a paste. Terminals differ
in the sequences that they remove from pastes themselves.
"""

from __future__ import annotations

import re

BEGIN, END = "\x1b[200~", "\x1b[201~"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~])?")


class PasteFilter:
    """Filter of terminal input that comes in portions."""

    def __init__(self) -> None:
        self._pasting = False
        self._before = ""
        """Last characters outside a paste: its begin mark may be split across reads."""
        self._held = ""
        """Held-back end of the data within a paste: an escape sequence or end mark that may go on in the next read."""

    def plain(self, data: str) -> str:
        """Return a portion without the escape sequences of pastes, and without what is held back for the next one."""
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
