"""Events of an archive: their texts, in which a program may have printed anything, are hidden or masked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gputrain_tui.history.status_file import Status
from gputrain_tui.recipe.allow_list import AllowList
from trainer.contract.record import Failure, RankStacks, RankState, RunEnded, Sample, ThreadStack, encode_event
from trainer.contract.record.downsampled import DownsampledBlock, DownsampledNote
from trainer.contract.record.json_lines import DECODE_ERRORS, AnyEvent

MAX_LINE_BYTES = 16 << 20
"""Length from which a line is damage, as by a sparse file."""
_TEXTS: dict[type[Any], tuple[str, ...]] = {
    Failure: ("message", "traceback"),
    RankState: ("message",),
    RunEnded: ("message",),
    Sample: ("text",),
    RankStacks: ("native_problem",),
}
"""Texts of events that a program or its data may have made."""
_EXCEPTION = re.compile(r"\b[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b", re.ASCII)
_FRAME = re.compile(r"Traceback \(most recent call last\):|  File \".*\", line \d+, in \S+", re.ASCII)

_event = msgspec.json.Decoder(AnyEvent)
_note = msgspec.json.Decoder(DownsampledNote)
_block = msgspec.json.Decoder(DownsampledBlock)


def hide_text(text: str) -> str:
    """Return the types of exceptions that a text names, and stars for the rest; never longer than the text."""
    shown = ", ".join(dict.fromkeys(_EXCEPTION.findall(text)))
    short = f"{shown}: ***" if shown else "***"
    return short if len(short) <= len(text) else "*" * len(text)


def hide_traceback(text: str) -> str:
    """Return the places of a traceback, without lines of code and the exception's text."""
    return "\n".join(line for line in text.splitlines() if _FRAME.fullmatch(line))


class EventFilter:
    """Filters the lines of a record, each to the same length, because the downsampled record counts bytes."""

    def __init__(self, allow: AllowList, *, texts: bool) -> None:
        """Hide the values that ``allow`` hides wherever they occur; show texts, with these masked, if ``texts``."""
        self._allow = allow
        self._texts = texts
        self.left_out = 0
        """Lines that are no events, and were replaced by blanks."""

    def event(self, event: Any) -> Any:
        if not self._texts:
            for name in _TEXTS.get(type(event), ()):
                text = getattr(event, name)
                if text is not None:
                    setattr(event, name, hide_traceback(text) if name == "traceback" else hide_text(text))
        for name in ("message", "traceback", "text", "advice", "path", "run_dir", "reason", "native_problem"):
            text = getattr(event, name, None)
            if isinstance(text, str):
                masked = self._allow.mask(text.encode("utf-8", "surrogatepass"))
                setattr(event, name, masked.decode("utf-8", "surrogatepass"))
        if isinstance(event, RankStacks):  # names of threads are free texts; a mask keeps the length of what it hides
            for field in ("threads", "native"):
                stacks = getattr(event, field)
                named = [ThreadStack(each.name if self._texts else "", each.frames) for each in stacks]
                masked = self._allow.mask(msgspec.json.encode(named))
                setattr(event, field, msgspec.json.decode(masked, type=list[ThreadStack]))
        return event

    def status(self, status: Status) -> Status:
        """Return a run's status without its hidden texts."""
        ended = RunEnded(time=0.0, status="failed", exit_code=1, message=status.message)
        return msgspec.structs.replace(status, message=self.event(ended).message)

    def lines(self, parts: Iterable[bytes], name: str) -> Iterator[bytes]:
        """Yield the lines of a file of the record: of events, or of the downsampled record by its name."""
        decoder: msgspec.json.Decoder[Any] = _event
        if name.startswith("digest/"):
            decoder = _note if name.endswith(".notes.ndjson") else _block
        rest, skipping = b"", False
        for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield (self._blank(line) if skipping else self._fitted(line, decoder)) + b"\n"
                skipping = False
            if len(rest) > MAX_LINE_BYTES:
                yield self._blank(rest)
                rest, skipping = b"", True
        if rest:
            yield self._blank(rest) if skipping else self._fitted(rest, decoder)

    def _fitted(self, line: bytes, decoder: msgspec.json.Decoder[Any]) -> bytes:
        if not line.strip():
            return line
        try:
            shown = self._shown(line, decoder)
        except DECODE_ERRORS:
            return self._blank(line)
        return shown.ljust(len(line)) if len(shown) <= len(line) else self._blank(line)

    def _blank(self, line: bytes) -> bytes:
        self.left_out += 1
        return b" " * len(line)

    def _shown(self, line: bytes, decoder: msgspec.json.Decoder[Any]) -> bytes:
        entry = decoder.decode(line)
        before = encode_event(entry)
        self.event(entry.event if isinstance(entry, DownsampledNote) else entry)
        after = encode_event(entry)
        return line if after == before else after.rstrip(b"\n")
