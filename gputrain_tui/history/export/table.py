"""Writes one line per rank and step: CSV with all fields as columns, or JSON objects."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import BinaryIO

import msgspec

from gputrain_tui.history.export.steps import RecordedSteps, SingleStep
from trainer.contract.record import SINGLE_VALUES, Metrics, ShareChange, Step, encode_event

CORE_WAIT_PHASES = ("data", "h2d", "forward", "backward", "sync", "optimizer", "other")
"""Phases of ``core_wait_ms``, which has a column for each."""

_KEYS = ("rank", "step", "time", "epoch")
_SCALARS = tuple(
    name for name in Step.__struct_fields__
    if name not in (
        *_KEYS, *SINGLE_VALUES.values(), "steps", "core_wait_ms", "bucket_ms", "non_finite", "groups", "calls"
    )
)  # fmt: skip
_scalars_of = attrgetter(*_SCALARS)
COLUMNS = (
    "rank", "attempt", "step", "averaged_over", "time", "epoch", "share", "host", *_SCALARS,
    *(f"core_wait_{phase}_ms" for phase in CORE_WAIT_PHASES), "bucket_ms", "groups",
)  # fmt: skip
_json = msgspec.json.Encoder().encode
_NO_WAITS = ("",) * len(CORE_WAIT_PHASES)


def write_csv(record: RecordedSteps, file: BinaryIO) -> None:
    """Write a line per rank and step, rank after rank; values that were not measured are empty.

    The share is the rank's samples of a micro-step where shares are balanced, the host that of the attempt. The
    times of the buckets are numbers with spaces between them, the collectives by group a JSON list; single calls
    are left out. The user's own metrics have columns behind all others, ``metric:NAME``.
    """
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        rows = csv.writer(text, lineterminator="\n")
        names = record.metric_names()
        rows.writerow([*COLUMNS, *(f"metric:{name}" for name in names)])
        changes = record.share_changes()
        for rank in record.ranks:
            metrics = _MetricsBySteps(record.metrics(rank) if names else iter(()))
            for single in record.of(rank):
                own = metrics.at(single.attempt, single.step.step) if names else {}
                row = _row(single, _share(changes, rank, single), record.extents[rank].host)
                rows.writerow([*row, *(own.get(name, "") for name in names)])
        text.flush()
    finally:
        text.detach()  # the caller closes the file


class _MetricsBySteps:
    """A rank's own metrics, found in the order of its steps."""

    def __init__(self, metrics: Iterator[tuple[int, Metrics]]) -> None:
        self._metrics = metrics
        self._next: tuple[int, Metrics] | None = next(metrics, None)

    def at(self, attempt: int, step: int) -> dict[str, float]:
        """Return the metrics of a step; those of earlier ones are passed over."""
        values: dict[str, float] = {}
        while self._next is not None and (self._next[0], self._next[1].step) <= (attempt, step):
            if (self._next[0], self._next[1].step) == (attempt, step):
                values |= self._next[1].values
            self._next = next(self._metrics, None)
        return values


def _share(changes: Sequence[tuple[int, ShareChange]], rank: int, single: SingleStep) -> object:
    """Return a rank's share of the global batch at a step; empty where shares are not balanced."""
    at = bisect_right(changes, (single.attempt, single.step.step), key=lambda each: (each[0], each[1].step))
    if not at or changes[at - 1][0] != single.attempt or rank >= len(changes[at - 1][1].shares):
        return ""
    return changes[at - 1][1].shares[rank]


def _row(single: SingleStep, share: object, host: str) -> tuple[object, ...]:
    attempt, averaged_over, _, step = single
    waits = step.core_wait_ms
    return (
        step.rank, attempt, step.step, averaged_over, step.time, step.epoch, share, host, *_scalars_of(step),
        *(_NO_WAITS if waits is None else [waits.get(phase, 0.0) for phase in CORE_WAIT_PHASES]),
        "" if step.bucket_ms is None else " ".join(map(str, step.bucket_ms)),
        "" if step.groups is None else _json(step.groups).decode(),
    )  # fmt: skip


def write_jsonl(record: RecordedSteps, file: BinaryIO) -> None:
    """Write a step event of the record for each single step, with ``attempt`` and ``averaged_over`` besides.

    Behind the steps of a rank are its events of the user's own metrics, with ``attempt``.
    """
    parts: list[bytes] = []
    parts_per_write = 2000  # buffered parts, two for each line, after which they are written: about 300 KB
    for rank in record.ranks:
        for attempt, averaged_over, _, step in record.of(rank):
            parts.append(encode_event(step)[:-2])
            parts.append(b',"attempt":%d,"averaged_over":%d}\n' % (attempt, averaged_over))
            if len(parts) >= parts_per_write:
                file.write(b"".join(parts))
                parts.clear()
        for attempt, event in record.metrics(rank):
            parts.append(encode_event(event)[:-2])
            parts.append(b',"attempt":%d}\n' % attempt)
            if len(parts) >= parts_per_write:
                file.write(b"".join(parts))
                parts.clear()
    file.write(b"".join(parts))
