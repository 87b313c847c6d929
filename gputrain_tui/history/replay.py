"""Replays a long run from its downsampled record, and returns the offsets at which to follow each file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import msgspec

from gputrain_tui.history.follow import by_rank
from gputrain_tui.history.run_reader import merged
from trainer.contract.record import AnyEvent, RunDir, decode_events
from trainer.contract.record.downsampled import LEVELS, DownsampledBlock, DownsampledNote, block_file, note_file
from trainer.contract.record.json_lines import decode_lines, is_within_world
from trainer.contract.record.numbers import MAX_RANKS
from trainer.contract.record.regular_file import read_part, read_whole, size_of

READ_WHOLE_BYTES = 40 << 20
"""A shorter record is read whole, in less than a second."""
MAX_BYTES_PER_BLOCK_EVENT = 15 << 20
"""Maximum of record size by events per block: 40,000 blocks of 370-byte events; the finest such level is read."""
TAIL_BYTES = 4 << 20
"""Size of the newest events of all ranks together, which are read one by one: recent means are taken over them."""
MIN_TAIL_BYTES = 32 << 10
"""Minimum of that size for one file."""
MAX_GAP_BYTES = 64 << 20
"""Bytes of one file that may lie outside of all blocks; with more, the record is read from its beginning."""

_decode_blocks = msgspec.json.Decoder(DownsampledBlock)
_decode_notes = msgspec.json.Decoder(DownsampledNote)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The events of a run up to an offset in each event file."""

    events: list[AnyEvent | DownsampledBlock]
    """By time, those of one file in its order; a block stands for several step events."""
    begin: dict[str, int]
    """Offset at which to continue, by event file without suffix."""
    steps: int
    """Maximum number of steps in a block."""


def replay(run: RunDir, world_size: int = MAX_RANKS, *, newest: int = MAX_RANKS) -> Replay | None:
    """Return the replay of a run; None where its record is short or was not downsampled.

    ``world_size`` counts the ranks of all attempts, ``newest`` those of the last one: the record of others ends early.
    """
    try:
        with os.scandir(run.events) as entries:
            sizes = {entry.name.removesuffix(".ndjson"): size_of(entry.path) for entry in entries}
    except OSError:
        return None
    total = sum(sizes.values())
    if total <= READ_WHOLE_BYTES or not run.digest.is_dir():
        return None
    ranks = sorted((name for name in sizes if name.isdecimal() and int(name) < world_size), key=by_rank)
    tail = max(MIN_TAIL_BYTES, TAIL_BYTES // max(len(ranks), 1))
    level = next((level for level in LEVELS if total / level <= MAX_BYTES_PER_BLOCK_EVENT), LEVELS[-1])
    blocks_by_name = {name: _blocks(run, name, level, sizes[name] - tail) for name in ranks}
    former = {name for name in ranks if int(name) >= newest}
    ends = [blocks[-1].step for name, blocks in blocks_by_name.items() if blocks and name not in former]
    if not ends or len(ends) < len(ranks) - len(former):
        return None
    common = min(ends)  # single events of all ranks begin at about the same step
    files: list[list[AnyEvent | DownsampledBlock]] = []
    begin = {}
    for name in ranks:
        blocks = _until(blocks_by_name[name], common)
        if not blocks and name in former:
            continue  # its attempts were short: they are read whole
        events = _of_rank(run, name, blocks, world_size) if blocks else None
        if events is None:
            return None
        files.append(events)
        begin[name] = blocks[-1].end
    for name, size in sizes.items():
        if name not in begin and note_file(run.digest, name).exists():  # of a node: samples, and how its ranks ended
            begin[name] = _line_after(run, name, size - tail)
            files.append([note.event for note in _notes(run, name, world_size) if note.begin < begin[name]])
    merged_events = merged(files)
    steps = max(event.steps for event in merged_events if isinstance(event, DownsampledBlock))
    return Replay(events=merged_events, begin=begin, steps=steps)


def _of_rank(
    run: RunDir, name: str, blocks: Sequence[DownsampledBlock], world_size: int
) -> list[AnyEvent | DownsampledBlock] | None:
    """Return the blocks of a rank, and its events outside of them, up to the last block's end, in the file's order.

    None where too much of the file is in no block.
    """
    gaps = _gaps(blocks)
    if sum(last - first for first, last in gaps) > MAX_GAP_BYTES:
        return None
    # A block stands where its last event does.
    placed: list[tuple[int, AnyEvent | DownsampledBlock]] = [(block.end, block) for block in blocks]
    for first, last in gaps:
        lines = _part(run.events / f"{name}.ndjson", first, last - first)
        placed += [(first, event) for event in decode_events(lines, world_size)]
    placed += [
        (note.begin, note.event)
        for note in _notes(run, name, world_size)
        if note.begin < blocks[-1].end and not any(first <= note.begin < last for first, last in gaps)
    ]
    placed.sort(key=itemgetter(0))
    return [event for _, event in placed]


def _part(path: Path, begin: int = 0, count: int | None = None) -> bytes:
    """Return ``count`` bytes of a file, or all; none where it cannot be read."""
    try:
        return read_whole(path) if count is None else read_part(path, begin, count)
    except OSError:
        return b""


def _blocks(run: RunDir, name: str, level: int, before: int) -> list[DownsampledBlock]:
    """Return a rank's valid blocks that end before an offset of its events."""
    data = _part(block_file(run.digest, name, level))
    trusted: list[DownsampledBlock] = []
    for block in decode_lines(_decode_blocks, data[: data.rfind(b"\n") + 1]):
        if not (trusted[-1].end if trusted else 0) <= block.begin <= block.end <= before or block.rank != int(name):
            break
        trusted.append(block)
    while trusted and _part(run.events / f"{name}.ndjson", trusted[-1].end - 1, 1) != b"\n":
        trusted.pop()
    return trusted


def _until(blocks: list[DownsampledBlock], step: int) -> list[DownsampledBlock]:
    """Return the blocks up to the last one that does not go beyond a step; after restarts there may be several such."""
    count = len(blocks)
    while count and blocks[count - 1].step > step:
        count -= 1
    return blocks[:count]


def _gaps(blocks: Sequence[DownsampledBlock]) -> list[tuple[int, int]]:
    """Return the byte ranges that no block covers: a killed process leaves its last block unwritten."""
    ends = [0, *(block.end for block in blocks)]
    return [(end, block.begin) for end, block in zip(ends, blocks, strict=False) if block.begin > end]


def _notes(run: RunDir, name: str, world_size: int) -> list[DownsampledNote]:
    """Return the other events of a file, which the downsampled record keeps whole."""
    notes = decode_lines(_decode_notes, _part(note_file(run.digest, name)))
    return [note for note in notes if is_within_world(note.event, world_size)]


def _line_after(run: RunDir, name: str, byte: int) -> int:
    if byte <= 0:
        return 0
    rest = _part(run.events / f"{name}.ndjson", byte, MIN_TAIL_BYTES)
    return byte + rest.find(b"\n") + 1 if rest else 0
