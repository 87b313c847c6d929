"""One attempt at a run: its launched nodes, and ``attempt.json``, from which a new supervisor adopts them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.node_process import NodeProcess
from trainer.contract.errors import RecordError
from trainer.contract.record import Failure, RunDir, write_atomically
from trainer.contract.record.events import Count, Rank
from trainer.contract.record.regular_file import read_json
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity
from trainer.host.temporary_folder import delete_temporary_folders, system_folder


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
    tmp: Path
    """Folder in which the nodes of this machine have their temporary folders."""
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
    """Folder in which the nodes of this machine have their temporary folders."""


def delete_temporary_files(run_dir: RunDir, nodes: Iterable[int], tmp: Path) -> None:
    """Delete the temporary folders of nodes, which a killed node agent has left."""
    delete_temporary_folders(run_dir.path, nodes, tmp)


_decode = msgspec.json.Decoder(AttemptRecord)


def write_attempt(run_dir: RunDir, attempt: Attempt) -> None:
    """Write ``attempt.json``; print a line if it cannot be written, as on a full disk."""
    running = [(process.node, process.identity) for process in attempt.running.values()]
    processes = {node: identity for node, identity in running if identity is not None}
    launched = AttemptRecord(since=dict(attempt.since), processes=processes, tmp=str(attempt.tmp))
    try:
        write_atomically(run_dir.attempt, msgspec.json.encode(launched))
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
