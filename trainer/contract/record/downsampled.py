"""Downsampled record: a few lines for thousands of steps, so that a long run is shown at once.

A *block* has the means and extremes of consecutive steps of a rank, and the range of bytes in the event file that it
replaces. Each block width (16, 64, 256, … steps) has its own file; all other events are repeated in a file of *notes*.
A reader takes the events themselves from where these files end, or if they are missing.
"""

from __future__ import annotations

import os
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.record.events import SINGLE_VALUES, Event, Metrics, Step
from trainer.contract.record.json_lines import AnyEvent
from trainer.contract.record.machine_samples import NodeSample
from trainer.contract.record.numbers import Count, FiniteFloat
from trainer.contract.record.regular_file import open_to_append

LEVELS = (16, 64, 256, 1024, 4096)
"""Events per block, by file."""
MEANS = (
    "loss", "grad_norm", "local_grad_norm", "step_ms", "data_ms", "h2d_ms", "forward_ms",
    "backward_ms", "optimizer_ms", "other_ms", "gc_ms", "sync_ms", "sync_exposed_ms",
)  # fmt: skip
"""Fields with a mean over the steps in which they were measured."""
MEANS_OF = attrgetter(*MEANS)


class DownsampledBlock(Step, kw_only=True, tag="steps"):
    """Consecutive step events of a rank as one, with means and extremes."""

    begin: Count
    """First byte of the events that it replaces."""
    end: Count
    loss_low: FiniteFloat | None = None
    loss_high: FiniteFloat | None = None
    step_ms_low: FiniteFloat | None = None
    step_ms_high: FiniteFloat | None = None
    sync_exposed_ms_low: FiniteFloat | None = None
    sync_exposed_ms_high: FiniteFloat | None = None


class DownsampledNote(msgspec.Struct, kw_only=True, gc=False):
    """Event other than a step, and the first byte of its line."""

    begin: Count
    event: AnyEvent


def block_file(folder: Path, name: str, level: int) -> Path:
    """Return the file of the blocks of one level; ``name`` is that of the event file without suffix."""
    return folder / f"{name}.{level}.ndjson"


def note_file(folder: Path, name: str) -> Path:
    """Return the file of the notes of an event file; ``name`` is that of the event file without suffix."""
    return folder / f"{name}.notes.ndjson"


class _OpenBlock:
    """Block that still grows.

    Events are folded in many at a time, which is faster than one by one.
    """

    __slots__ = ("begin", "events", "highs", "last", "lows", "samples", "steps", "sums", "tokens", "weights")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.last: Step | None = None
        self.events: list[Step] = []
        """Events not folded in yet, all of one class."""
        self.steps = 0
        self.samples: int | None = None
        self.tokens: int | None = None
        self.sums = dict.fromkeys(MEANS, 0.0)
        self.weights = dict.fromkeys(MEANS, 0)
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}

    def add(self, event: Step) -> None:
        self.last = event
        self.events.append(event)
        if len(self.events) == LEVELS[0]:  # bounds the memory of a long block
            self._fold()

    def _fold(self) -> None:
        events, self.events = self.events, []
        if not events:
            return
        weights = [event.steps for event in events]
        self.steps += sum(weights)
        for event in events:
            if event.samples is not None:
                self.samples = (self.samples or 0) + event.samples
            if event.tokens is not None:
                self.tokens = (self.tokens or 0) + event.tokens
        for name, column in zip(MEANS, zip(*map(MEANS_OF, events), strict=True), strict=True):
            for value, n in zip(column, weights, strict=True):
                if value is not None and isfinite(value):
                    self.sums[name] += value * n
                    self.weights[name] += n
        for name, singles in SINGLE_VALUES.items():
            if isinstance(events[0], DownsampledBlock):
                lows = [getattr(event, f"{name}_low") for event in events]
                highs = [getattr(event, f"{name}_high") for event in events]
            else:
                lows = highs = [
                    value for event in events for value in (getattr(event, singles) or (getattr(event, name),))
                ]
            for extremes, choose, values in ((self.lows, min, lows), (self.highs, max, highs)):
                known = [value for value in values if value is not None and isfinite(value)]
                if known:
                    extremes[name] = choose([*known, extremes.get(name, known[0])])

    def closed(self, end: int) -> DownsampledBlock:
        self._fold()
        last = self.last
        assert last is not None
        figures: dict[str, Any] = {name: self.sums[name] / self.weights[name] for name in MEANS if self.weights[name]}
        figures |= {f"{name}_low": value for name, value in self.lows.items()}
        figures |= {f"{name}_high": value for name, value in self.highs.items()}
        return DownsampledBlock(
            time=last.time, rank=last.rank, step=last.step, epoch=last.epoch, steps=self.steps, samples=self.samples,
            tokens=self.tokens, lr=last.lr, clock_set_ms=last.clock_set_ms, sync_bytes=last.sync_bytes,
            sync_buckets=last.sync_buckets,
            begin=self.begin, end=end, **figures,
        )  # fmt: skip


class _OpenMetrics:
    """A user's own metrics since the last block of the narrowest width ended: they become one note, with means."""

    __slots__ = ("begin", "counts", "last", "non_finite", "sums")

    def __init__(self) -> None:
        self.begin = 0
        self.last: Metrics | None = None
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.non_finite: set[str] = set()

    def add(self, event: Metrics, begin: int) -> None:
        self.begin = begin if self.last is None else self.begin
        self.last = event
        for name, value in event.values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1
        self.non_finite.update(event.non_finite)

    def closed(self) -> Metrics:
        assert self.last is not None
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return Metrics(
            time=self.last.time, rank=self.last.rank, step=self.last.step, values=means,
            non_finite=sorted(self.non_finite - means.keys()),
        )  # fmt: skip


class Downsampler:
    """Downsampler of one event file: turns its events, in the order of their lines, into blocks and notes."""

    def __init__(self, folder: Path, name: str, at: int) -> None:
        self._folder = folder
        self._name = name
        self._end = at
        self._open = {level: _OpenBlock(at) for level in LEVELS}
        self._unit = 1
        """Steps per event: the least power of two that no event so far exceeds."""
        self._metrics = _OpenMetrics()
        self._lines: dict[Path, list[bytes]] = {}
        self._encode = msgspec.json.Encoder().encode
        self._begun: set[Path] = set()

    def add(self, event: Event, size: int) -> None:
        """Add the next event; its line takes ``size`` bytes of the event file."""
        begin, self._end = self._end, self._end + size
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Metrics):
            self._metrics.add(event, begin)
        elif not isinstance(event, NodeSample):
            self._note(event, begin)

    def _note(self, event: Event, begin: int) -> None:
        line = self._encode({"begin": begin, "event": event}) + b"\n"
        self._lines.setdefault(note_file(self._folder, self._name), []).append(line)

    def _note_metrics(self) -> None:
        metrics, self._metrics = self._metrics, _OpenMetrics()
        if metrics.last is not None:
            self._note(metrics.closed(), metrics.begin)

    def _step(self, event: Step) -> None:
        while self._unit < event.steps:
            self._unit *= 2
        for level in LEVELS:
            block = self._open[level]
            block.add(event)
            width = level * self._unit
            if event.step // width == (event.step - event.steps) // width:
                return
            event = self._close(level, block)

    def _close(self, level: int, block: _OpenBlock) -> DownsampledBlock:
        if level == LEVELS[0]:
            self._note_metrics()
        closed = block.closed(self._end)
        self._open[level] = _OpenBlock(self._end)
        self._lines.setdefault(block_file(self._folder, self._name, level), []).append(self._encode(closed) + b"\n")
        return closed

    def finish(self) -> None:
        self._note_metrics()
        carried: DownsampledBlock | None = None
        for level in LEVELS:
            block = self._open[level]
            if carried is not None:
                block.add(carried)
            carried = self._close(level, block) if block.last is not None else None

    def take(self) -> dict[Path, bytes]:
        """Return the bytes to append to each file since the last call."""
        lines, self._lines = self._lines, {}
        appended = {}
        for path, parts in lines.items():
            torn = path not in self._begun and path.exists()  # an earlier process may have left a part of a line
            self._begun.add(path)
            appended[path] = b"\n" * torn + b"".join(parts)
        return appended

    @staticmethod
    def append(parts: dict[Path, bytes]) -> None:
        """Append to the files; call it after the event lines that they replace are written.

        Raises:
            OSError: a write failed; write nothing more afterwards, since readers would not see the gap.
        """
        for path, data in parts.items():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = open_to_append(path)
            try:
                if os.write(fd, data) < len(data):
                    raise OSError("the disk took only a part")
            finally:
                os.close(fd)
