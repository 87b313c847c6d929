"""One attempt at a run: its launched nodes, and ``attempt.json``, from which a new supervisor adopts them."""

from __future__ import annotations

import os
import stat
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.launchers import NodeProcess
from trainer.contract.errors import RecordError
from trainer.contract.record import Failure, RunDir, write_atomically
from trainer.contract.record.events import Count, Rank
from trainer.contract.record.regular_file import read_json
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """Outcome of a run, or of one attempt at it."""

    status: Literal["finished", "failed", "stopped"]
    reason: str | None = None
    """Cause of a stop, such as ``stopped by SIGINT``; None if it was not stopped."""
    failure: Failure | None = None
    recorded: bool = False
    """Whether the failure is in the record already."""


@dataclass
class Attempt:
    """Node processes of one launch."""

    since: Mapping[str, int]
    """Sizes of the event files at its start, by file name."""
    running: dict[int, NodeProcess] = field(default_factory=dict)
    """By the file descriptor of the process."""
    ended: dict[int, attempt_outcome.NodeEnd] = field(default_factory=dict)
    """By node, in the order in which they ended."""
    failure: Failure | None = None
    """Failure of the supervisor itself."""
    stop_level: StopLevel = StopLevel.NONE
    """Stop level sent to the nodes."""
    deadline: float | None = None
    """Time at which running nodes are killed, monotonic seconds; None for never."""


class AttemptRecord(msgspec.Struct, kw_only=True):
    """Contents of ``attempt.json``, from which a new supervisor adopts the nodes of an attempt."""

    since: dict[str, Count]
    """Sizes of the event files at the start of the attempt, by file name."""
    processes: dict[Rank, ProcessIdentity]
    """By node; nodes on hosts that have not answered yet are absent."""
    tmp: str
    """Temporary folder of the run; used only if ``is_temporary_of`` holds for it."""


def temporary_prefix(run_dir: RunDir) -> str:
    """Return the prefix of names of a run's temporary folders outside its directory: a hash of the run's path."""
    path = os.fsencode(os.path.realpath(run_dir.path))
    return f"gputrain-{zlib.crc32(path):08x}-"


def is_temporary_of(run_dir: RunDir, path: Path) -> bool:
    """Whether a folder is a temporary folder of this run, by its path or by its name and owner."""
    if path == run_dir.tmp:
        return True
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return False
    named = path.is_absolute() and path.name.startswith(temporary_prefix(run_dir))
    return named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


_decode = msgspec.json.Decoder(AttemptRecord)


def write_attempt(run_dir: RunDir, attempt: Attempt, tmp: str) -> None:
    """Write ``attempt.json``; print a line if it cannot be written, as on a full disk."""
    running = [(process.node, process.identity) for process in attempt.running.values()]
    processes = {node: identity for node, identity in running if identity is not None}
    launched = AttemptRecord(since=dict(attempt.since), processes=processes, tmp=tmp)
    try:
        write_atomically(run_dir.attempt, msgspec.json.encode(launched))
    except OSError as error:
        print(f"cannot write {run_dir.attempt}: {error.strerror}", file=sys.stderr, flush=True)


def read_attempt(run_dir: RunDir) -> AttemptRecord:
    """Read ``attempt.json`` of a killed supervisor; without a readable one, return a record without processes.

    Nodes that are in no record are not adopted but killed.
    """
    try:
        launched = read_json(run_dir.attempt, _decode)
    except RecordError:
        return AttemptRecord(since={}, processes={}, tmp=str(run_dir.tmp))
    if not is_temporary_of(run_dir, Path(launched.tmp)):
        launched.tmp = str(run_dir.tmp)
    return launched
