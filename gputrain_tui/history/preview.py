"""Previews a long history that was not downsampled, from samples of its files.

Reading every event of a hundred thousand steps of many ranks takes a while; meanwhile this is what is shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from gputrain_tui.history.runs import RunReader
from gputrain_tui.history.series import Series
from gputrain_tui.state import RunState
from trainer.contract.record import AnyEvent, RunDir, Step, decode_events
from trainer.contract.record.downsampled import DownsampledBlock
from trainer.contract.record.regular_file import open_regular, size_of

WORTH_BYTES = 16 << 20
"""A record shorter than this is read through at once."""
SAMPLES = 12_000
"""Places at which all files together are looked into."""
MOST_SAMPLES = 240
"""Places per file: two for every column of a wide chart."""
BLOCK_BYTES = 2048
"""What is read at one place: a whole event is in it."""
HEAD_BYTES = 8192
"""What is read of a file's beginning: who the rank is."""
TAIL_BYTES = 16 << 10
MOST_TAIL_BYTES = 4 << 20
"""What is read of the ends: per file, and of all of them."""


class Preview:
    """State and curves of a run from a part of its record; ``poll`` follows what is appended."""

    def __init__(self, run_dir: RunDir, state: RunState) -> None:
        """Look into the files.

        Args:
            run_dir: of the run.
            state: to begin with.
        """
        self.state = state
        self.series = Series(state.world_size)
        files = _rank_files(run_dir)
        events = [event for path, size in files for event in _samples(path, size, len(files), state.world_size)]
        events.sort(key=attrgetter("time"))
        last = max((event.step for event in events if type(event) is Step), default=0)
        per_file = _places(len(files))
        # Two samples of a rank may be this far apart, and every row is to have all ranks.
        self.series.coarsen(max(2 * last // per_file, 1))
        self._take(events)
        self.series.refine()
        tail = min(TAIL_BYTES * max(len(files), 1), MOST_TAIL_BYTES)
        self._source = RunReader(run_dir, last_bytes=tail)

    def poll(self) -> None:
        """Take in what was appended."""
        self._take(self._source.poll())

    def close(self) -> None:
        """Let go of the files."""
        self._source.close()

    def _take(self, events: list[AnyEvent]) -> None:
        apply_all(events, self.state, self.series)


def apply_all(events: Sequence[AnyEvent | DownsampledBlock], state: RunState, series: Series) -> None:
    """Put events into state and curves."""
    apply, draw = state.apply, series.apply
    for event in events:
        apply(event)
        if type(event) is Step or type(event) is DownsampledBlock:
            draw(event)


def _places(files: int) -> int:
    return min(max(SAMPLES // max(files, 1), 8), MOST_SAMPLES)


def _rank_files(run_dir: RunDir) -> list[tuple[str, int]]:
    """Return the ranks' files and their sizes."""
    with suppress(OSError), os.scandir(run_dir.events) as entries:
        return [
            (entry.path, size_of(entry.path))
            for entry in entries
            if Path(entry.name).stem.isdecimal() and entry.name.endswith(".ndjson")
        ]
    return []


def _samples(path: str, size: int, files: int, world_size: int) -> list[AnyEvent]:
    """Return the events at a file's beginning, and one at each of several places."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return []
    try:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        found = [head[: head.rfind(b"\n") + 1]]
        count = _places(files)
        for place in range(1, count):
            block = os.pread(descriptor, BLOCK_BYTES, place * size // count)
            begin = block.find(b"\n") + 1
            end = block.find(b"\n", begin) + 1
            if 0 < begin < end:
                found.append(block[begin:end])
    finally:
        os.close(descriptor)
    return decode_events(b"".join(found), world_size)
