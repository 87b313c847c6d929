"""One attempt at a run: its result, and ``attempt.json``, from which a new supervisor adopts its nodes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import Failure, RunDir, write_atomically
from trainer.contract.record.numbers import Count, Rank
from trainer.contract.record.regular_file import read_json
from trainer.host.process_identity import ProcessIdentity
from trainer.host.temporary_folder import system_folder


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """Outcome of a run, or of one attempt at it."""

    status: Literal["finished", "failed", "stopped"]
    reason: str | None = None
    """Cause of a stop, such as ``stopped by SIGINT``; None if it was not stopped."""
    failure: Failure | None = None
    recorded: bool = False
    """Whether the failure is in the record already."""


def failed(kind: str, message: str, *, host: str | None = None, rank: int | None = None) -> AttemptResult:
    """Return the result of a run that has failed now."""
    failure = Failure(time=time.time(), kind=kind, host=host, rank=rank, message=message)
    return AttemptResult(status="failed", failure=failure)


def with_note(ended: AttemptResult, note: str) -> AttemptResult:
    """Return a result with a note after its reason, or after the message of its failure."""
    if ended.failure is None:
        return replace(ended, reason=f"{ended.reason}, {note}")
    failure = msgspec.structs.replace(ended.failure, message=f"{ended.failure.message}; {note}")
    return replace(ended, failure=failure)


class AttemptRecord(msgspec.Struct, kw_only=True):
    """Contents of ``attempt.json``, from which a new supervisor adopts the nodes of an attempt."""

    since: dict[str, Count]
    """Sizes of the event files at its start, by file name."""
    processes: dict[Rank, ProcessIdentity]
    """By node; nodes on hosts that have not answered yet are absent."""
    tmp: str
    """Folder in which the nodes of this machine have their temporary folders."""


_decode = msgspec.json.Decoder(AttemptRecord)


def write_attempt(run_dir: RunDir, attempt: AttemptRecord) -> None:
    """Write ``attempt.json``; print a line if it cannot be written, as on a full disk."""
    try:
        write_atomically(run_dir.attempt, msgspec.json.encode(attempt))
    except OSError as error:
        print(f"cannot write {run_dir.attempt}: {error.strerror}", file=sys.stderr, flush=True)


def read_attempt(run_dir: RunDir) -> AttemptRecord:
    """Read ``attempt.json`` of a killed supervisor; without a readable one, return a record without processes.

    Nodes that are in no record are not adopted but killed.
    """
    try:
        return read_json(run_dir.attempt, _decode)
    except RecordError:
        return AttemptRecord(since={}, processes={}, tmp=str(system_folder()))
