"""Replays a long run from its downsampled record, and finds where to read on in each file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import msgspec

from gputrain_tui.history.follow import by_rank
from trainer.contract.record import MAX_RANKS, AnyEvent, RunDir, decode_events
from trainer.contract.record.downsampled import LEVELS, DownsampledBlock, DownsampledNote, block_file, note_file
from trainer.contract.record.events import DECODE_ERRORS, is_within_world
from trainer.contract.record.regular_file import read_part, read_whole, size_of

WHOLE_BYTES = 40 << 20
"""A record that is no longer than this is read whole: it takes less than a second."""
MOST_BLOCKS = 40_000
"""Blocks read of all ranks together; the finest that are not more are chosen."""
STEP_BYTES = 370
"""Of one step's line, about."""
TAIL_BYTES = 4 << 20
"""Of the newest events that are read whole in any case, all ranks together: what recent means are taken over."""
SHORTEST_TAIL_BYTES = 32 << 10
"""The same of one file."""
MOST_GAP_BYTES = 64 << 20
"""Bytes that no block stands for, of one file; where there are more the record is read from its beginning."""

_decode_blocks = msgspec.json.Decoder(DownsampledBlock)
_decode_notes = msgspec.json.Decoder(DownsampledNote)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What happened until a byte of each event file."""

    events: list[AnyEvent | DownsampledBlock]
    """In the order of their times; blocks stand for step events."""
    begin: dict[str, int]
    """Per event file, by its name without suffix, where to read on."""
    steps: int
    """That a block covers at most."""


def replay(run: RunDir, world_size: int = MAX_RANKS) -> Replay | None:
    """Return the past of a run, or None where there is no digest or the record is short enough to be read.

    Args:
        run: its directory.
        world_size: its ranks; what is told of others is passed over.
    """
    try:
        with os.scandir(run.events) as entries:
            sizes = {entry.name.removesuffix(".ndjson"): size_of(entry.path) for entry in entries}
    except OSError:
        return None
    total = sum(sizes.values())
    if total <= WHOLE_BYTES or not run.digest.is_dir():
        return None
    ranks = sorted((name for name in sizes if name.isdecimal() and int(name) < world_size), key=by_rank)
    tail = max(SHORTEST_TAIL_BYTES, TAIL_BYTES // max(len(ranks), 1))
    level = next((level for level in LEVELS if total / STEP_BYTES / level <= MOST_BLOCKS), LEVELS[-1])
    found = {name: _blocks(run, name, level, sizes[name] - tail) for name in ranks}
    ends = [blocks[-1].step for blocks in found.values() if blocks]
    if not ends or len(ends) < len(ranks):
        return None
    common = min(ends)  # every rank is read whole from about the same step on
    events: list[AnyEvent | DownsampledBlock] = []
    begin = {}
    for name in ranks:
        blocks = _until(found[name], common)
        if not blocks:
            return None
        begin[name] = blocks[-1].end
        gaps = _gaps(blocks)
        if sum(last - first for first, last in gaps) > MOST_GAP_BYTES:
            return None
        for gap in gaps:
            events += _read(run, name, *gap, world_size)
        events += blocks
        events += [
            note.event
            for note in _notes(run, name, world_size)
            if note.begin < begin[name] and not any(first <= note.begin < last for first, last in gaps)
        ]
    for name, size in sizes.items():
        if name not in begin and note_file(run.digest, name).exists():  # of a node: samples, and how its ranks ended
            begin[name] = _line_after(run, name, size - tail)
            events += [note.event for note in _notes(run, name, world_size) if note.begin < begin[name]]
    events.sort(key=attrgetter("time"))
    steps = max(event.steps for event in events if isinstance(event, DownsampledBlock))
    return Replay(events=events, begin=begin, steps=steps)


def _blocks(run: RunDir, name: str, level: int, before: int) -> list[DownsampledBlock]:
    """Return a rank's blocks that end before a byte of its events, as far as they can be trusted."""
    try:
        data = read_whole(block_file(run.digest, name, level))
    except OSError:
        return []
    data = data[: data.rfind(b"\n") + 1]
    try:
        blocks = _decode_blocks.decode_lines(data)
    except DECODE_ERRORS:
        blocks = list(_sound(data))
    trusted: list[DownsampledBlock] = []
    for block in blocks:
        if not (trusted[-1].end if trusted else 0) <= block.begin <= block.end <= before or block.rank != int(name):
            break
        trusted.append(block)
    while trusted and not _ends_line(run.events / f"{name}.ndjson", trusted[-1].end):
        trusted.pop()
    return trusted


def _sound(lines: bytes) -> list[DownsampledBlock]:
    """Return the blocks that can be understood: a line may have been left torn."""
    found = []
    for line in lines.splitlines():
        try:
            found.append(_decode_blocks.decode(line))
        except DECODE_ERRORS:
            continue
    return found


def _ends_line(path: Path, end: int) -> bool:
    """Return whether a line of a file ends at a byte."""
    try:
        return read_part(path, end - 1, 1) == b"\n"
    except OSError:
        return False


def _until(blocks: list[DownsampledBlock], step: int) -> list[DownsampledBlock]:
    """Return the blocks up to a step, at the last time that it was reached."""
    count = len(blocks)
    while count and blocks[count - 1].step > step:
        count -= 1
    return blocks[:count]


def _gaps(blocks: list[DownsampledBlock]) -> list[tuple[int, int]]:
    """Return the bytes that no block stands for: of a process that was killed before it closed its last."""
    ends = [0, *(block.end for block in blocks)]
    return [(end, block.begin) for end, block in zip(ends, blocks, strict=False) if block.begin > end]


def _read(run: RunDir, name: str, begin: int, end: int, world_size: int) -> list[AnyEvent]:
    try:
        lines = read_part(run.events / f"{name}.ndjson", begin, end - begin)
    except OSError:
        return []
    return decode_events(lines, world_size)


def _notes(run: RunDir, name: str, world_size: int) -> list[DownsampledNote]:
    """Return what else a file tells, as far as it is noted."""
    try:
        data = read_whole(note_file(run.digest, name))
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            note = _decode_notes.decode(line)
        except DECODE_ERRORS:
            continue
        if is_within_world(note.event, world_size):
            found.append(note)
    return found


def _line_after(run: RunDir, name: str, byte: int) -> int:
    """Return where the first line after a byte begins."""
    if byte <= 0:
        return 0
    try:
        return byte + read_part(run.events / f"{name}.ndjson", byte, SHORTEST_TAIL_BYTES).find(b"\n") + 1
    except OSError:
        return 0
