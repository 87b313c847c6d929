"""Previews a long record that was not downsampled, from samples of its files.

It is shown while all events are read, which takes seconds for a hundred thousand steps of many ranks.
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

MIN_PREVIEW_BYTES = 16 << 20
"""A shorter record is read whole at once."""
MAX_SAMPLES = 12_000
"""Of all files together."""
MAX_FILE_SAMPLES = 240
"""Per file: two for every column of a wide chart."""
SAMPLE_BYTES = 2048
"""Longer than two step events, so that a sample holds a whole one."""
HEAD_BYTES = 8192
"""Of a file's beginning, where the rank's host and device are."""
FILE_TAIL_BYTES = 16 << 10
MAX_TAIL_BYTES = 4 << 20
"""Of the files' ends: per file, and of all together."""


class Preview:
    """State and curves of a run from samples of its record; ``poll`` reads what is appended."""

    def __init__(self, run_dir: RunDir, state: RunState) -> None:
        """Read the samples.

        Args:
            run_dir: of the run.
            state: initial state, which is changed.
        """
        self.state = state
        self.series = Series(state.world_size)
        files = _rank_files(run_dir)
        events = [event for path, size in files for event in _samples(path, size, len(files), state.world_size)]
        events.sort(key=attrgetter("time"))
        last = max((event.step for event in events if type(event) is Step), default=0)
        per_file = _samples_per_file(len(files))
        # Two samples of a rank may be this far apart, and every row needs one of each rank.
        self.series.coarsen(max(2 * last // per_file, 1))
        self._apply(events)
        self.series.refine()
        tail = min(FILE_TAIL_BYTES * max(len(files), 1), MAX_TAIL_BYTES)
        self._source = RunReader(run_dir, last_bytes=tail)

    def poll(self) -> None:
        """Read and apply what was appended."""
        self._apply(self._source.poll())

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _apply(self, events: list[AnyEvent]) -> None:
        apply_all(events, self.state, self.series)


def apply_all(events: Sequence[AnyEvent | DownsampledBlock], state: RunState, series: Series) -> None:
    """Apply events to state and curves."""
    apply, draw = state.apply, series.apply
    for event in events:
        apply(event)
        if type(event) is Step or type(event) is DownsampledBlock:
            draw(event)


def _samples_per_file(files: int) -> int:
    return min(max(MAX_SAMPLES // max(files, 1), 8), MAX_FILE_SAMPLES)


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
        count = _samples_per_file(files)
        for place in range(1, count):
            block = os.pread(descriptor, SAMPLE_BYTES, place * size // count)
            begin = block.find(b"\n") + 1
            end = block.find(b"\n", begin) + 1
            if 0 < begin < end:
                found.append(block[begin:end])
    finally:
        os.close(descriptor)
    return decode_events(b"".join(found), world_size)
