"""Outcome of an attempt, read from its record: events of the ranks decide on success, not exit codes.

A rank may abort or hang while its interpreter shuts down after a successful run: its ``finished`` event counts, and
an exit code of 0 without that event does not.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gputrain_tui.lifecycle.remote_nodes import path_with_host
from gputrain_tui.state.standstill import MIN_RECORD_BYTES
from gputrain_tui.tables import ranks_text
from trainer.contract.errors import ExitCode
from trainer.contract.outcome import (
    LOST_PEER_KINDS,
    RECORD_END_MISSING,
    SOCKET_NOTE,
    NodeOutcome,
    lost_peer_text,
    node_outcome,
    root_cause,
    signal_name,
)
from trainer.contract.record import AnyEvent, Failure, NodeSample, RankState, RunDir, decode_events
from trainer.contract.record.regular_file import TAIL_BYTES, open_regular, read_part, read_tail, size_of
from trainer.contract.rendezvous_url import port_in_use

LOG_BYTES = 64 << 10
ACCEPTED_STATES = ("training", "validating", "saving", "finished")
"""States of a rank that has accepted the request and can no longer refuse it."""
STOPPED = frozenset({int(ExitCode.STOPPED), -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP})
"""Exit codes of a node agent that was stopped on its machine; negative if it had no signal handlers yet."""
STEP_LINE = re.compile(r"(?:srun|slurmstepd)(?:-\S+)?: ")
"""Begin of Slurm's lines in a node's log: how the step ended, after what the node agent printed about why."""
REASON_LINES = 40
"""Last lines of a node's log that are searched for one of the node agent."""


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """End of a node agent."""

    host: str
    exit_code: int
    """Negative signal number if a signal ended it."""
    unfinished: list[int]
    """Its ranks without a record of having finished."""
    host_error: str = ""
    killed_by_us: bool = False
    """Whether the supervisor killed it; its end is then no cause, even if it was seen first."""


def event_file_sizes(run_dir: RunDir) -> dict[str, int]:
    """Return the size of every event file by name."""
    return {path.name: size_of(path) for path in run_dir.events.glob("*.ndjson")}


def record_sizes(run_dir: RunDir) -> dict[str, int]:
    """Return the sizes of the event files and of the nodes' logs by name; taken at the start of an attempt."""
    return event_file_sizes(run_dir) | {path.name: size_of(path) for path in run_dir.logs.glob("node-*.log")}


def unfinished(run_dir: RunDir, node: int, ranks: Iterable[int], since: Mapping[str, int]) -> list[int]:
    """Return the ranks of a node that have not finished in this attempt.

    A rank counts as finished by its event or by the outcome that its node agent wrote: on a full disk, or at the limit
    of a file's size, it reports its end to the node agent alone.
    """
    missing = [rank for rank in ranks if not _finished(run_dir.rank_events(rank), since)]
    outcome = node_outcome(run_dir, node) if missing else None
    return [
        rank for rank in missing if outcome is None or rank not in outcome.ranks or not outcome.ranks[rank].finished
    ]


def describe_missing_record(run_dir: RunDir, nodes: Iterable[int], gaps: Sequence[str]) -> str:
    """Describe why the record is not whole, with what ranks have told of their gaps; empty when it is."""
    reasons = gaps or [outcome.not_recorded for outcome in _outcomes(run_dir, nodes) if outcome.not_recorded][:1]
    shown = 3
    why = "; ".join([*reasons[:shown], *([f"and {len(reasons) - shown} more"] if len(reasons) > shown else [])])
    if disk_is_full(run_dir):
        return f"the disk of the run directory is full: {RECORD_END_MISSING}"
    return f"{RECORD_END_MISSING}: {why}" if why else ""


def holds_work(run_dir: RunDir) -> bool:
    """Whether a rank has trained or a checkpoint exists; True as well on a full disk, which may hide either."""
    if any(not path.name.startswith(".") for path in run_dir.checkpoints.glob("*")) or disk_is_full(run_dir):
        return True
    return any(_trained(path) for path in run_dir.events.glob("*.ndjson"))


def disk_is_full(run_dir: RunDir) -> bool:
    """Whether the disk of the run directory, or its quota, has less than ``MIN_RECORD_BYTES`` left."""
    probe = run_dir.path / f".room-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * MIN_RECORD_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def failures(run_dir: RunDir, since: Mapping[str, int]) -> list[Failure]:
    """Return the failures that ranks and nodes recorded in this attempt."""
    events = (event for path in run_dir.events.glob("*.ndjson") for event in _tail(path, since, b'"failure"'))
    return [event for event in events if isinstance(event, Failure)]


def is_port_in_use(run_dir: RunDir, since: Mapping[str, int], port: int) -> bool:
    """Whether rank 0 or its node agent found the port of the rendezvous in use in this attempt."""
    recorded = [failure.message for failure in failures(run_dir, since)]
    return any(port_in_use(port) in line for line in [*recorded, _node_reason(run_dir, 0, since)])


def failed_before(run_dir: RunDir, since: Mapping[str, int], nodes: Iterable[int], until: float) -> bool:
    """Whether a failure that is no consequence of a stop was recorded in this attempt before a time, Unix seconds."""
    recorded = _all_failures(run_dir, since, nodes)
    return any(failure.time <= until and failure.kind not in LOST_PEER_KINDS for failure in recorded)


def cause(run_dir: RunDir, since: Mapping[str, int], ended: Mapping[int, NodeEnd], now: float) -> Failure:
    """Return the root cause of a failed attempt; ``since``: ``record_sizes`` when it began."""
    missing = [(node, end) for node, end in ended.items() if end.unfinished]
    recorded = recorded_cause(run_dir, since, [node for node, _ in missing])
    killed = [(node, end) for node, end in missing if end.host_error or (end.exit_code < 0 and not end.killed_by_us)]
    if recorded is not None and not (killed and recorded.kind == "lost_peer"):
        return recorded
    for node, end in killed or missing:
        return _failure_from_exit(run_dir, node, end, since, now)
    return Failure(time=now, kind="exit", message="the run ended and no rank recorded a reason")


def recorded_cause(run_dir: RunDir, since: Mapping[str, int], nodes: Iterable[int]) -> Failure | None:
    """Return the root cause among the failures that ranks and nodes recorded in this attempt; None without one."""
    recorded = _all_failures(run_dir, since, nodes)
    return root_cause((int(failure.time * 1e9), failure) for failure in recorded)


def _all_failures(run_dir: RunDir, since: Mapping[str, int], nodes: Iterable[int]) -> list[Failure]:
    """Return the recorded failures, and those in the nodes' outcomes: an event may be missing, on a full disk."""
    reported = [outcome.failure for outcome in _outcomes(run_dir, nodes) if outcome.failure is not None]
    return [*failures(run_dir, since), *reported]


def _outcomes(run_dir: RunDir, nodes: Iterable[int]) -> list[NodeOutcome]:
    return [outcome for node in nodes if (outcome := node_outcome(run_dir, node)) is not None]


def node_end(
    run_dir: RunDir, node: int, ranks: Iterable[int], since: Mapping[str, int], code: int, *, host: str = ""
) -> NodeEnd:
    """Return the end of a node by its record and the exit code of its node agent."""
    missing = unfinished(run_dir, node, ranks, since)
    if missing and code == ExitCode.FINISHED and disk_is_full(run_dir):
        missing = []  # neither the ranks nor their node agent could write their end
    return NodeEnd(host=host, exit_code=_exit_code(run_dir, node, code) if missing else code, unfinished=missing)


def _exit_code(run_dir: RunDir, node: int, code: int) -> int:
    """Return a node's exit code, replaced by ``-SIGINT`` if SIGINT came while Python itself was starting.

    Python then exits with 1, as after a failure; the last line of the log, ``KeyboardInterrupt``, shows the cause.
    """
    silent = code == ExitCode.FAILED and node_outcome(run_dir, node) is None
    return -signal.SIGINT if silent and last_lines(run_dir.node_log(node), 1) == ["KeyboardInterrupt"] else code


def is_deleted(run_dir: RunDir) -> bool:
    """Whether a run directory was deleted: lock and plan are gone, though ranks that save may recreate folders."""
    try:
        return not (run_dir.lock.exists() or run_dir.plan.exists())
    except OSError:
        return False  # an error of a network file system, which may recover


def deletion_failure(run_dir: RunDir, now: float) -> Failure:
    """Return the failure of a run whose directory was deleted during the run."""
    message = f"the run directory {run_dir.path} was deleted during the run"
    return Failure(time=now, kind="run_directory", message=message)


def first_stopped_node(ended: Mapping[int, NodeEnd]) -> int | None:
    """Return the first node to end, if a stop on its own machine and not the supervisor ended it; None otherwise."""
    first = next(((node, end) for node, end in ended.items() if end.unfinished), None)
    return first[0] if first is not None and first[1].exit_code in STOPPED else None


def delete_partial_checkpoints(run_dir: RunDir) -> None:
    """Delete the temporary files of checkpoints whose ranks were killed while writing."""
    for path in run_dir.checkpoints.glob(".*.pt.tmp"):
        with suppress(OSError):
            path.unlink()


def describe_kept(run_dir: RunDir, nodes: Iterable[int]) -> str:
    """Describe the update and checkpoint at which ranks stopped, and ranks that did not answer; may be empty."""
    outcomes = _outcomes(run_dir, nodes)
    parts = []
    stopped = [outcome.stopped_at for outcome in outcomes if outcome.stopped_at is not None]
    not_kept = next((outcome.not_kept for outcome in outcomes if outcome.not_kept), "")
    if not stopped and not_kept:  # the stop request came while the last update was saved
        parts.append(f"but {not_kept}")
    if stopped:
        saved = next(
            (path_with_host(run_dir, outcome.node, outcome.saved) for outcome in outcomes if outcome.saved), None
        )
        kept = f", saved {saved}" if saved else "" if not_kept else ", without a checkpoint"
        parts.append(f"at step {max(stopped)}{kept}" + (f", but {not_kept}" if not_kept else ""))
    silent = sorted(rank for outcome in outcomes for rank in outcome.unanswered)
    if silent:
        parts.append(f"without saving, because {ranks_text(silent)} did not answer")
    killed = sorted(rank for outcome in outcomes for rank in outcome.killed)
    if killed:
        whose = "it saves" if len(killed) == 1 else "they save"
        parts.append(f"without waiting for {ranks_text(killed)} beyond train.stop_grace: what {whose} may be lost")
    return "; ".join(parts)


def largest_rank(run_dir: RunDir, node: int) -> int | None:
    """Return the rank of a node with at least twice the memory (RSS) of every other in the last sample; else None."""
    samples = [
        event for event in _tail(run_dir.node_events(node), {}, b'"node_sample"') if isinstance(event, NodeSample)
    ]
    sizes = sorted((rank.rss_bytes or 0, rank.rank) for rank in samples[-1].ranks) if samples else []
    return sizes[-1][1] if len(sizes) > 1 and sizes[-1][0] >= 2 * sizes[-2][0] > 0 else None


def reason_line(lines: Sequence[str]) -> str:
    """Return the last line that a node's processes printed; one of Slurm itself only where there is no other."""
    chosen = [line for line in lines if not STEP_LINE.match(line)] or lines
    return chosen[-1].removeprefix("gputrain: ").removeprefix("trainer: ").strip() if chosen else ""


def _node_reason(run_dir: RunDir, node: int, since: Mapping[str, int]) -> str:
    log = run_dir.node_log(node)
    return reason_line(last_lines(log, REASON_LINES, since=since.get(log.name, 0)))


def last_lines(path: Path, count: int, *, since: int = 0) -> list[str]:
    """Return the last non-blank lines of a text file after byte ``since``; none when it cannot be read.

    Torch's notes on connections, which explain nothing, are left out where there is anything else.
    """
    try:
        text = read_tail(path, min(LOG_BYTES, max(size_of(path) - since, 0))).decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if not SOCKET_NOTE.match(line)] or lines)[-count:]


def _trained(path: Path) -> bool:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            events = (event for line in file if b'"rank_state"' in line for event in decode_events(line))
            return any(isinstance(event, RankState) and event.state in ACCEPTED_STATES for event in events)
    except OSError:
        return True  # unreadable: it may have trained


def _finished(path: Path, since: Mapping[str, int]) -> bool:
    events = _tail(path, since, b'"finished"')
    return any(isinstance(event, RankState) and event.state == "finished" for event in events)


def _tail(path: Path, since: Mapping[str, int], text: bytes) -> Iterator[AnyEvent]:
    """Yield the events of this attempt in the last ``TAIL_BYTES`` of a file whose lines contain the text."""
    try:
        begin = since.get(path.name, 0)
        start = max(begin, size_of(path) - TAIL_BYTES)
        lines = read_part(path, start, TAIL_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines[1:] if start > begin else lines:  # the first may be cut in the middle
        if text in line:
            yield from decode_events(line)


def _failure_from_exit(run_dir: RunDir, node: int, end: NodeEnd, since: Mapping[str, int], now: float) -> Failure:
    """Return the failure that a node's exit code and log show; for an attempt without recorded failures."""
    code, names = end.exit_code, ranks_text(end.unfinished)
    # A process prints nothing about SIGKILL: its last line is about something else.
    last_line = lost_peer_text(_node_reason(run_dir, node, since)) if code != -signal.SIGKILL else ""
    suffix = f": {last_line}" if last_line else ""
    if end.host_error:
        kind, message = "launch", f"node {node} on {end.host}: {end.host_error}"
    elif code == ExitCode.BAD_REQUEST:
        kind, message = "request", last_line or f"node {node} rejected the request without a message"
    elif code == ExitCode.REFUSED:
        kind = "refused"
        message = last_line or f"node {node} refused to start without a message"
    elif code < 0:
        kind, message = "signal", f"node {node} was killed by {signal_name(-code)} before {names} finished{suffix}"
    else:
        kind, message = "exit", f"node {node} ended with exit code {code} and {names} did not finish{suffix}"
    return Failure(time=now, kind=kind, host=end.host, message=message)
