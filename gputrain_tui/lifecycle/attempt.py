"""One attempt at a run: its launched nodes, and ``attempt.json``, from which a new supervisor adopts them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import RecordError
from trainer.contract.outcome import LOST_PEER_KINDS, node_outcome
from trainer.contract.record import Failure, RunDir, write_atomically
from trainer.contract.record.numbers import Count, Rank
from trainer.contract.record.regular_file import read_json
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity
from trainer.host.stop_request import StopRequest
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
    deadline: float | None = None
    """Time at which running nodes are killed, monotonic seconds; None for never."""


class AttemptRecord(msgspec.Struct, kw_only=True):
    """Contents of ``attempt.json``, from which a new supervisor adopts the nodes of an attempt."""

    since: dict[str, Count]
    processes: dict[Rank, ProcessIdentity]
    """By node; nodes on hosts that have not answered yet are absent."""
    tmp: str


def delete_temporary_files(run_dir: RunDir, nodes: Sequence[int], tmp: Path) -> None:
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


def attempt_result(
    attempt: Attempt,
    plan: Plan,
    run_dir: RunDir,
    *,
    stop_request: StopRequest,
    adopting: bool,
    over_before: Collection[int],
    missing_rank: Callable[[], Failure | None],
) -> AttemptResult:
    """Return the result of an attempt of which no node runs: finished, stopped by whom, or failed for which cause.

    ``adopting``: the supervisor has taken over from one that was killed; ``over_before`` are nodes that had ended, with
    unfinished ranks, when it did. ``missing_rank`` returns the failure of the rank that the others have lost, by the
    record of all ranks.
    """
    ends = attempt.ended.values()
    if len(ends) == len(plan.nodes) and not any(end.unfinished for end in ends):
        return AttemptResult(status="finished")
    failed_before_stop = _failed_before_stop(attempt, plan, run_dir, stop_request.requested_at, over_before)
    if stop_request.reason is not None and not failed_before_stop:
        return AttemptResult(status="stopped", reason=stop_request.reason)
    if attempt.failure is not None:
        return AttemptResult(status="failed", failure=attempt.failure)
    unasked = not adopting and stop_request.reason is None
    if unasked and (stopped := attempt_outcome.first_stopped_node(attempt.ended)) is not None:
        host = attempt.ended[stopped].host
        return AttemptResult(status="stopped", reason=f"node {stopped} was stopped on {host}")
    failure = attempt_outcome.cause(run_dir, attempt.since, attempt.ended, time.time())
    failures = attempt_outcome.failures(run_dir, attempt.since)
    recorded = failure in failures
    only_lost = bool(failures) and all(other.kind == "lost_peer" for other in failures)
    # The record of all ranks shows the lost one better than the failure of a node agent.
    if only_lost and failure.kind in LOST_PEER_KINDS and (missing := missing_rank()) is not None:
        failure, recorded = missing, False
    if adopting and attempt_outcome.recorded_cause(run_dir, attempt.since, attempt.ended) is None:
        return failed("signal", "the run's supervisor was killed, and its ranks ended with it")
    return AttemptResult(status="failed", failure=failure, recorded=recorded)


def _failed_before_stop(
    attempt: Attempt, plan: Plan, run_dir: RunDir, requested_at: float | None, over_before: Collection[int]
) -> bool:
    """Whether the attempt had failed before the stop request, so that its result is the cause of that failure."""
    if requested_at is None:
        return False
    outcomes = [node_outcome(run_dir, node) for node in over_before]
    if any(outcome is None or outcome.failure is not None for outcome in outcomes):
        return True
    return attempt_outcome.failed_before(run_dir, attempt.since, [node.node for node in plan.nodes], requested_at)
