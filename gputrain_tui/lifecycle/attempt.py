"""One attempt: the launched nodes of a run, and what a successor of the supervisor must know of them."""

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
    """How a run, or one attempt at it, ended."""

    status: Literal["finished", "failed", "stopped"]
    reason: str | None = None
    """What stopped it, where something did."""
    failure: Failure | None = None
    recorded: bool = False
    """Whether the failure stands in the record already."""


@dataclass
class Attempt:
    """The nodes of one launch."""

    since: Mapping[str, int]
    """Sizes of the event files when it began."""
    running: dict[int, NodeProcess] = field(default_factory=dict)
    """By descriptor."""
    ended: dict[int, attempt_outcome.NodeEnd] = field(default_factory=dict)
    """By node, in the order in which they ended."""
    failure: Failure | None = None
    """The failure of the supervisor itself."""
    stop_level: StopLevel = StopLevel.NONE
    """What has been asked of the nodes."""
    deadline: float | None = None
    """When what is still running is killed, monotonic seconds."""


class AttemptRecord(msgspec.Struct, kw_only=True):
    """What a supervisor that takes over must know, ``attempt.json``."""

    since: dict[str, Count]
    """Sizes of the event files when the attempt began."""
    processes: dict[Rank, ProcessIdentity]
    """Of each node."""
    tmp: str
    """The run's temporary folder; believed only where the folder itself names the run."""


def temporary_prefix(run_dir: RunDir) -> str:
    """Return how names of temporary folders outside of a run directory begin, from which the run is known."""
    path = os.fsencode(os.path.realpath(run_dir.path))
    return f"gputrain-{zlib.crc32(path):08x}-"


def is_temporary_of(run_dir: RunDir, path: Path) -> bool:
    """Whether a folder is a temporary one of this very run."""
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
    """Write what a supervisor that takes over must know; on a full disk go on without."""
    running = [(process.node, process.identity) for process in attempt.running.values()]
    processes = {node: identity for node, identity in running if identity is not None}
    launched = AttemptRecord(since=dict(attempt.since), processes=processes, tmp=tmp)
    try:
        write_atomically(run_dir.attempt, msgspec.json.encode(launched))
    except OSError as error:
        print(f"cannot write {run_dir.attempt}: {error.strerror}", file=sys.stderr, flush=True)


def read_attempt(run_dir: RunDir) -> AttemptRecord:
    """Read what a killed supervisor has left; empty where it was killed before that, and what it started is killed."""
    try:
        launched = read_json(run_dir.attempt, _decode)
    except RecordError:
        return AttemptRecord(since={}, processes={}, tmp=str(run_dir.tmp))
    if not is_temporary_of(run_dir, Path(launched.tmp)):
        launched.tmp = str(run_dir.tmp)
    return launched
