"""Steps that a rank has made and that its event file lacks, as on a full disk, told in a file that needs no space."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.contract.record.events import Finding, Step
from trainer.contract.record.json_lines import decode_events, encode_event
from trainer.contract.record.regular_file import open_regular, read_part

RECORD_INCOMPLETE = "record_incomplete"
"""Kind of the finding that events of the run are not in its record."""
FILE_BYTES = 1024
"""Size of the file, reserved when the rank starts and overwritten in place."""
TELL_S = 0.5
"""Minimum time between two updates of the file while only its counts change."""
COUNTS = ("steps", "samples", "tokens")
"""Keys of the evidence, totals over the steps that are not on disk."""


class UnrecordedSteps:
    """Counts of the steps that one writer could not write, told as a ``record_incomplete`` finding.

    Its ``step`` is the last one on disk when writing failed last, its ``message`` the error, empty once writing goes
    on; ``evidence`` has ``began``, which tells the writers of one rank apart, ``step``, the last one done, and totals.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Reserve space for the file unless that was done; on a full disk nothing can be told."""
        self._path, self._rank = path, rank
        self.is_open = False
        """Whether the last write failed, and not all events were written since."""
        self._began = 0.0
        self._recorded_step = self._step = 0
        self._waiting = [0, 0, 0]
        """Counts of the steps that wait in the queue."""
        self._dropped = [0, 0, 0]
        """Counts of the steps that will never be written."""
        self._message = ""
        self._told: tuple[tuple[bool, str], tuple[int, ...]] = ((False, ""), ())
        self._tell_at = -math.inf
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if not path.exists():
                path.write_bytes(b" " * FILE_BYTES)
                path.chmod(0o600)

    def add(self, event: Step, *, dropped: bool) -> None:
        """Count a step that is queued or dropped; one that is queued while writing succeeds needs no count."""
        if dropped and not self._began:
            self._began, self._recorded_step = time.time(), event.step - event.steps
        if dropped or self.is_open:
            self._step = event.step
            _count(self._dropped if dropped else self._waiting, [event], 1)

    def note_write(self, written: Sequence[bytes], waiting: Sequence[bytes], error: str) -> None:
        """Note the lines of a write, those that wait still, and the error that ended it, empty if it succeeded."""
        if error and not self.is_open:
            if steps := _steps(waiting):
                self.is_open = True
                self._began = self._began or time.time()
                self._recorded_step, self._step = steps[0].step - steps[0].steps, steps[-1].step
                _count(self._waiting, steps, 1)
        elif self.is_open:
            _count(self._waiting, _steps(written), -1)
            if not error and not waiting:
                self.clear()
        self._message = error

    def note_unwritten(self, lines: Sequence[bytes], error: str) -> None:
        """Note lines that wait to be written by another process."""
        if self.is_open:
            for event in _steps(lines):
                self.add(event, dropped=False)
        else:
            self.note_write([], lines, error)

    def clear(self) -> None:
        """Forget the steps that wait: they are about to be written."""
        self.is_open, self._waiting, self._message = False, [0, 0, 0], ""

    def tell(self, *, at_once: bool) -> None:
        """Overwrite the file if something has changed; ``at_once``: also if that was done a moment ago."""
        if not self._began:
            return
        counts = tuple(waiting + dropped for waiting, dropped in zip(self._waiting, self._dropped, strict=True))
        reason, now = (self.is_open, self._message), time.monotonic()
        figures = (self._recorded_step, self._step, *counts)
        if (reason, figures) == self._told or (not at_once and reason == self._told[0] and now < self._tell_at):
            return
        self._told, self._tell_at = (reason, figures), now + TELL_S
        finding = Finding(
            time=time.time(),
            kind=RECORD_INCOMPLETE,
            state="raised" if any(counts) else "cleared",
            rank=self._rank,
            step=self._recorded_step,
            message=self._message,
            evidence={"began": self._began, "step": self._step, **dict(zip(COUNTS, counts, strict=True))},
        )
        with suppress(OSError):  # it was not reserved
            descriptor = open_regular(self._path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, encode_event(finding).ljust(FILE_BYTES), 0)
            finally:
                os.close(descriptor)


def read_unrecorded(path: Path) -> Finding | None:
    """Return what a rank's file tells; None where it is absent, blank, or being written.

    Raises:
        OSError: it cannot be read.
    """
    events = decode_events(read_part(path, 0, FILE_BYTES))
    return next((event for event in events if isinstance(event, Finding) and event.kind == RECORD_INCOMPLETE), None)


def _steps(lines: Iterable[bytes]) -> list[Step]:
    return [event for line in lines if b'"step"' in line for event in decode_events(line) if isinstance(event, Step)]


def _count(counts: list[int], steps: Iterable[Step], sign: int) -> None:
    for event in steps:
        for place, number in enumerate((event.steps, event.samples or 0, event.tokens or 0)):
            counts[place] = max(counts[place] + sign * number, 0)
