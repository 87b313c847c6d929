"""Event writer that appends on a thread, so that training never waits for the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.contract.record.downsampled import Downsampler
from trainer.contract.record.events import Event, Lost, Step
from trainer.contract.record.json_lines import encode_event
from trainer.contract.record.regular_file import OwnedDescriptor
from trainer.contract.record.unrecorded import UnrecordedSteps


class EventWriter:
    """Writer of one event file that never blocks the caller.

    A thread writes queued events, ten times a second at most. While the disk is full or stalled, events wait in the
    queue; once that is full too, further events are dropped and counted, and a ``lost`` event marks the gap. The steps
    that a rank's file lacks are told in a file of their own. Without a path every call does nothing.
    """

    interval_s = 0.1
    capacity = 100_000
    """Maximum events in the queue."""
    lines_per_write = 1000
    """Lines per system call; without a bound each call would copy the whole queue."""

    def __init__(self, path: Path | None, *, rank: int | None = None, shared: bool = False) -> None:
        """Open the file, end a torn last line, and start the thread.

        To a ``shared`` file other processes append too; it is not downsampled, since byte offsets would be wrong.

        Raises:
            OSError: the file cannot be opened.
        """
        self._rank = rank
        self._pending: list[bytes] = []
        """Queue of lines to write; the first may be the rest of a line that was written in part."""
        self._lost = 0
        self._reason = ""
        """Why the last event was dropped."""
        self.write_error = ""
        """Error of the last write; empty when it succeeded."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._urgent = False
        """Whether ``write_now`` waits for the next write."""
        self._before_write: list[Callable[[bool], None]] = []
        self._unrecorded: UnrecordedSteps | None = None
        """None for other files than those of the ranks in a run directory."""
        self._thread: threading.Thread | None = None
        self._file: OwnedDescriptor
        self._downsampler: Downsampler | None = None
        """None for files outside of a run directory, for shared ones, and after a failed write of its files."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_to_append(path)
            size = path.stat().st_size
            if _is_torn(path):
                self._pending.append(b"\n")
                size += 1
            if path.parent.name == "events" and not shared:
                self._downsampler = Downsampler(path.parent.with_name("digest"), path.stem, size)
            if path.parent.name == "events" and rank is not None and path.stem == str(rank):
                self._unrecorded = UnrecordedSteps(path.parent.with_name("gaps") / f"{rank}.json", rank)
            self._thread = threading.Thread(target=self._run, args=(path,), name="event-writer", daemon=True)
            self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._thread is not None

    @property
    def lost(self) -> int:
        """Number of events dropped and not yet recorded as lost; after ``close`` also those still in the queue."""
        with self._lock:
            return self._lost + (0 if self.enabled else len(self._pending))

    def write(self, event: Event) -> None:
        """Queue one event; never blocks on the disk."""
        if self._thread is None:
            return
        line = encode_event(event)
        with self._lock:
            is_dropped = len(self._pending) >= self.capacity
            if is_dropped:
                self._lost += 1
                self._reason = self.write_error or "the disk is too slow"
            else:
                self._record_gap()
                self._queue(event, line)
            if self._unrecorded is not None and type(event) is Step:
                self._unrecorded.add(event, dropped=is_dropped)

    def _queue(self, event: Event, line: bytes) -> None:
        """Queue a line; the caller holds the lock."""
        self._pending.append(line)
        if self._downsampler is not None:
            self._downsampler.add(event, len(line))

    def before_each_write(self, call: Callable[[bool], None]) -> None:
        """Add a function that the thread calls before each write, ten times a second, to add events.

        Its argument is True if this may be the last write: when the writer closes, or in ``write_now``.
        """
        self._before_write.append(call)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all queued events are written, or the time-out; return whether nothing is pending."""
        deadline = time.monotonic() + timeout_s
        while self._thread is not None and self._thread.is_alive():
            with self._lock:
                if not self._pending and not self._lost:
                    return True
            self._wake.set()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return not self._pending

    def write_now(self, timeout_s: float = 1.0) -> None:
        """Write all events, including those of ``before_each_write``, within the time-out; the process may end next."""
        deadline = time.monotonic() + timeout_s
        self._urgent = True
        self._wake.set()
        while self._urgent and self._thread is not None and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the remaining events and end the thread, within the time-out."""
        if self._thread is None:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._thread = None

    def _record_gap(self) -> None:
        """Queue a ``lost`` event where events were dropped; the caller holds the lock."""
        if self._lost:
            lost = Lost(time=time.time(), rank=self._rank, events=self._lost, message=self._reason)
            self._queue(lost, encode_event(lost))
            self._lost = 0

    def _run(self, path: Path) -> None:
        while True:
            closing, urgent = self._closing, self._urgent
            for call in self._before_write:
                call(closing or urgent)
            self._drain(path)
            if urgent:
                self._urgent = False
            self._write_downsampled(closing)
            if self._unrecorded is not None:
                self._unrecorded.tell(at_once=closing or urgent)
            if closing:
                break
            self._wake.wait(until_next(time.time(), self.interval_s))
            self._wake.clear()
        self._file.close()

    def _drain(self, path: Path) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._record_gap()
                lines = self._pending[: self.lines_per_write]
            if not lines:
                return
            written = self._append(path, b"".join(lines))
            done = 0
            while done < len(lines) and written >= len(lines[done]):
                written -= len(lines[done])
                done += 1
            with self._lock:
                del self._pending[:done]
                if self._unrecorded is not None:
                    self._unrecorded.note_write(lines[:done], self._pending, self.write_error)
                if written:  # a part of a line; the rest of it comes next
                    self._pending[0] = self._pending[0][written:]
            if done < len(lines):
                return

    def _write_downsampled(self, closing: bool) -> None:
        """Write the downsampled record of lines that are on disk; stop it for good after an error."""
        with self._lock:
            if self._downsampler is None or self._pending:
                return
            if closing:
                self._downsampler.finish()
            downsampler = self._downsampler
            parts = downsampler.take()
        try:
            downsampler.append(parts)
        except OSError:
            self._downsampler = None

    def _append(self, path: Path, data: bytes) -> int:
        written = 0
        try:
            if not self._file.is_unchanged:
                self._file = _open_to_append(path)
            while written < len(data):
                written += os.write(self._file.fd, data[written:])
        except OSError as error:
            self.write_error = error.strerror or "the disk refused the write"
        else:
            self.write_error = ""
        return written


def _open_to_append(path: Path) -> OwnedDescriptor:
    return OwnedDescriptor(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))


def until_next(now: float, interval_s: float) -> float:
    """Return the seconds to the next multiple of an interval that is at least half an interval away.

    The writers of all ranks, whose Unix clocks agree to some milliseconds, so run at the same moments. Ranks wait for
    each other at each step: writers that ran at different moments would each delay all ranks.
    """
    return 1.5 * interval_s - (now + 0.5 * interval_s) % interval_s


def _is_torn(path: Path) -> bool:
    """Whether a file's last line lacks its line feed, as after a crash."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
