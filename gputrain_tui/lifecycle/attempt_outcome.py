"""How an attempt ended, read from the record; success is decided here, not by exit codes.

A rank may still abort or hang while its interpreter shuts down after a successful run, so what it wrote before
counts, and an exit code of 0 without it does not.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gputrain_tui.lifecycle.remote_nodes import path_with_host
from trainer.contract.errors import ExitCode
from trainer.contract.outcome import node_outcome, root_cause, signal_name
from trainer.contract.record import AnyEvent, Failure, NodeSample, RankState, RunDir, decode_events
from trainer.contract.record.regular_file import open_regular, read_part, read_tail, size_of

TAIL_BYTES = 1 << 20
"""How much of the end of an event file is searched for how its rank ended."""
LOG_BYTES = 64 << 10
"""How much of the end of a log is searched."""
ROOM_BYTES = 16 << 10
"""With less free space ranks may have been unable to write their last events."""
ACCEPTED_STATES = ("training", "validating", "saving", "finished")
"""States of a rank that has accepted the request."""
STOPPED = frozenset({int(ExitCode.STOPPED), -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP})
"""Exit codes of a node agent that was stopped on its machine; the negative ones before it had its handlers."""


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """How a node agent ended."""

    host: str
    exit_code: int
    """A signal's number negated."""
    unfinished: list[int]
    """Its ranks that did not record that they finished."""
    host_error: str = ""
    """Why its host did not start or keep it; empty where its log has the last word."""
    killed_by_us: bool = False
    """Whether the supervisor killed it; which of two nodes is seen to end first may be chance."""


def event_file_sizes(run_dir: RunDir) -> dict[str, int]:
    """Return the size of every event file, which marks the beginning of an attempt."""
    return {path.name: size_of(path) for path in run_dir.events.glob("*.ndjson")}


def unfinished(run_dir: RunDir, node: int, ranks: Iterable[int], since: Mapping[str, int]) -> list[int]:
    """Return the ranks of a node that ended without having finished in this attempt.

    A rank that could not record its end, on a full disk or beyond the limit of a file's size, has reported it to its
    node agent all the same.
    """
    missing = [rank for rank in ranks if not _finished(run_dir.rank_events(rank), since)]
    outcome = node_outcome(run_dir, node) if missing else None
    return [
        rank for rank in missing if outcome is None or rank not in outcome.ranks or not outcome.ranks[rank].finished
    ]


def describe_missing_record(run_dir: RunDir, nodes: Iterable[int]) -> str:
    """Describe what of the record is missing and why; empty when it is complete."""
    outcomes = [outcome for node in nodes if (outcome := node_outcome(run_dir, node)) is not None]
    why = next((outcome.not_recorded for outcome in outcomes if outcome.not_recorded), "")
    if disk_is_full(run_dir):
        return "the disk of the run directory is full: the end of the record is missing"
    return f"the end of the record is missing: {why}" if why else ""


def holds_work(run_dir: RunDir) -> bool:
    """Whether a rank came to train, a checkpoint is kept, or a full disk leaves that open."""
    if any(not path.name.startswith(".") for path in run_dir.checkpoints.glob("*")) or disk_is_full(run_dir):
        return True
    return any(_trained(path) for path in run_dir.events.glob("*.ndjson"))


def disk_is_full(run_dir: RunDir) -> bool:
    """Whether the disk of the run directory is full."""
    probe = run_dir.path / f".room-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * ROOM_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def failures(run_dir: RunDir, since: Mapping[str, int]) -> list[Failure]:
    """Return the failures that ranks and nodes recorded in this attempt."""
    found: list[Failure] = []
    for path in run_dir.events.glob("*.ndjson"):
        found += [event for event in _tail(path, since, b'"failure"') if isinstance(event, Failure)]
    return found


def cause(run_dir: RunDir, since: Mapping[str, int], ended: Mapping[int, NodeEnd], now: float) -> Failure:
    """Return the one failure that explains how the attempt ended.

    Args:
        run_dir: the record.
        since: sizes of the event files when the attempt began.
        ended: per node, in the order in which they ended.
        now: Unix seconds, for a failure that nobody recorded.
    """
    found = [*failures(run_dir, since), *_reported_failures(run_dir, ended)]
    recorded = root_cause((int(failure.time * 1e9), failure) for failure in found)
    missing = [(node, end) for node, end in ended.items() if end.unfinished]
    killed = [(node, end) for node, end in missing if end.host_error or (end.exit_code < 0 and not end.killed_by_us)]
    if recorded is not None and not (killed and recorded.kind == "lost_peer"):
        return recorded
    for node, end in killed or missing:
        return _failure_from_exit(run_dir, node, end, now)
    return Failure(time=now, kind="exit", message="the run ended and no rank says why")


def exit_code(run_dir: RunDir, node: int, code: int) -> int:
    """Return a node's exit code; SIGINT's where that came while Python itself was starting.

    Python then ends with 1 as if it had failed, and only the last line that it printed shows why.
    """
    silent = code == ExitCode.FAILED and node_outcome(run_dir, node) is None
    return -signal.SIGINT if silent and last_lines(run_dir.node_log(node), 1) == ["KeyboardInterrupt"] else code


def is_deleted(run_dir: RunDir) -> bool:
    """Whether a run directory is gone; ranks that save may have made its folders again."""
    try:
        return not (run_dir.lock.exists() or run_dir.plan.exists())
    except OSError:
        return False  # the file system does not answer, and may do so again


def deletion_failure(run_dir: RunDir, now: float) -> Failure:
    """Return the failure of a run whose directory was deleted while it went on.

    Args:
        run_dir: where it was.
        now: Unix seconds.
    """
    what = f"the run directory {run_dir.path} was deleted while the run went on"
    return Failure(time=now, kind="run_directory", message=what)


def first_stopped_node(ended: Mapping[int, NodeEnd]) -> int | None:
    """Return the node that was stopped on its own machine before anything had failed; None when none was.

    Args:
        ended: per node, in the order in which they ended; the supervisor had no stop request.
    """
    first = next(((node, end) for node, end in ended.items() if end.unfinished), None)
    return first[0] if first is not None and first[1].exit_code in STOPPED else None


def delete_partial_checkpoints(run_dir: RunDir) -> None:
    """Delete the unusable parts of checkpoints that ranks were killed while writing."""
    for path in run_dir.checkpoints.glob(".*.pt.tmp"):
        with suppress(OSError):
            path.unlink()


def rank_names(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def describe_kept(run_dir: RunDir, nodes: Iterable[int]) -> str:
    """Describe where stopped ranks are and what they have saved; empty when they were just ended."""
    outcomes = [outcome for node in nodes if (outcome := node_outcome(run_dir, node)) is not None]
    parts = []
    stopped = [outcome.stopped_at for outcome in outcomes if outcome.stopped_at is not None]
    not_kept = next((outcome.not_kept for outcome in outcomes if outcome.not_kept), "")
    if not stopped and not_kept:  # the stop request came while the last update was saved
        parts.append(f"but {not_kept}")
    if stopped:
        saved = next(
            (path_with_host(run_dir, outcome.node, outcome.saved) for outcome in outcomes if outcome.saved), None
        )
        words = f", saved {saved}" if saved else "" if not_kept else ", without a checkpoint"
        parts.append(f"at update {max(stopped)}{words}" + (f", but {not_kept}" if not_kept else ""))
    silent = sorted(rank for outcome in outcomes for rank in outcome.unanswered)
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        parts.append(f"without saving, because {who} did not answer")
    return "; ".join(parts)


def largest_rank(run_dir: RunDir, node: int) -> int | None:
    """Return the rank of a node that used twice the memory of every other when they were sampled last, if one did."""
    samples = [
        event for event in _tail(run_dir.node_events(node), {}, b'"node_sample"') if isinstance(event, NodeSample)
    ]
    sizes = sorted((rank.rss_bytes or 0, rank.rank) for rank in samples[-1].ranks) if samples else []
    return sizes[-1][1] if len(sizes) > 1 and sizes[-1][0] >= 2 * sizes[-2][0] > 0 else None


def last_lines(path: Path, count: int, *, since: int = 0) -> list[str]:
    """Return the last lines of a text file that are not blank; none when it cannot be read.

    Args:
        path: the file.
        count: how many at most.
        since: where in the file the first one may begin.
    """
    try:
        text = read_tail(path, min(LOG_BYTES, max(size_of(path) - since, 0))).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _trained(path: Path) -> bool:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            events = (event for line in file if b'"rank_state"' in line for event in decode_events(line))
            return any(isinstance(event, RankState) and event.state in ACCEPTED_STATES for event in events)
    except OSError:
        return True  # it may have


def _finished(path: Path, since: Mapping[str, int]) -> bool:
    events = _tail(path, since, b'"finished"')
    return any(isinstance(event, RankState) and event.state == "finished" for event in events)


def _tail(path: Path, since: Mapping[str, int], mark: bytes) -> Iterator[AnyEvent]:
    """Yield the events near the end of a file whose line holds the mark, from this attempt only."""
    try:
        begin = since.get(path.name, 0)
        start = max(begin, size_of(path) - TAIL_BYTES)
        lines = read_part(path, start, TAIL_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines[1:] if start > begin else lines:  # the first is torn when the cut is not a line's beginning
        if mark in line:
            yield from decode_events(line)


def _reported_failures(run_dir: RunDir, ended: Mapping[int, NodeEnd]) -> Iterator[Failure]:
    """Yield the failures in the nodes' outcomes: an event may be missing, on a full disk for instance."""
    for node, end in ended.items():
        result = node_outcome(run_dir, node) if end.unfinished else None
        if result is not None and result.failure is not None:
            yield result.failure


def _failure_from_exit(run_dir: RunDir, node: int, end: NodeEnd, now: float) -> Failure:
    """Return the failure that a node's exit code and log tail show, where nothing else is recorded."""
    host, code, ranks = end.host, end.exit_code, end.unfinished
    # A process prints nothing about SIGKILL: its last line is about something else.
    if end.host_error:
        return Failure(time=now, kind="launch", host=host, message=f"node {node} on {host}: {end.host_error}")
    words = last_lines(run_dir.node_log(node), 1) if code != -signal.SIGKILL else []
    said = f": {words[-1].removeprefix('gputrain: ').strip()}" if words else ""
    if code == ExitCode.BAD_REQUEST:
        return Failure(time=now, kind="request", host=host, message=said.removeprefix(": ") or "the request was wrong")
    if code == ExitCode.REFUSED:
        return Failure(
            time=now, kind="refused", host=host, message=said.removeprefix(": trainer: ") or "it was refused"
        )
    who = rank_names(ranks)
    if code < 0:
        what = f"node {node} was killed by {signal_name(-code)} before {who} finished{said}"
        return Failure(time=now, kind="signal", host=host, message=what)
    return Failure(
        time=now,
        kind="exit",
        host=host,
        message=f"node {node} ended with exit code {code} and {who} did not finish{said}",
    )
