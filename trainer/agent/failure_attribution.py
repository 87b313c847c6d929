"""Failures of a node's ranks, and the attribution of the node's failure to one of them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer.agent.assignment import RankAssignment
from trainer.agent.rank_failure import last_error
from trainer.agent.shutdown import Shutdown
from trainer.agent.worker_process import WorkerProcess
from trainer.contract.errors import ExitCode, ranks_text
from trainer.contract.option_rules import less_memory
from trainer.contract.outcome import NodeOutcome, exit_code_of, is_lost_peer, lost_peer_text, root_cause, signal_name
from trainer.contract.record import AnyEvent, EventWriter, Failure, RankState, RunDir, decode_events
from trainer.contract.record.regular_file import read_tail
from trainer.host.memory import MemoryGroup, oom_kills, read_memory_group


@dataclass(frozen=True, kw_only=True)
class _OwnGroup:
    """Memory cgroup of one rank, which is not that of the node agent, as it was last seen."""

    group: MemoryGroup
    oom_kills: int
    """Out-of-memory kills in it when it was first seen."""
    limit: tuple[int, Path] | None
    """Smallest limit, bytes, and the group that has it."""

    @property
    def is_gone(self) -> bool:
        """Whether it was removed with its last process, as systemd does with a scope."""
        return not self.group.folder.is_dir()


class FailureAttribution:
    """The failures of one node, in the order in which they were reported."""

    def __init__(self, writer: EventWriter) -> None:
        self.failures: list[tuple[int, Failure]] = []
        """Failures with their times, nanoseconds of the Unix clock."""
        self.not_recorded = ""
        """Reason why the end of a rank's record is not on disk; empty if it is."""
        self._writer = writer
        self._oom_kills = oom_kills()
        self._group = read_memory_group()
        self._group_oom_kills = 0 if self._group is None else self._group.oom_kills()
        self._own_groups: dict[int, _OwnGroup] = {}
        """Memory cgroups of ranks that are not in that of this process, by process id."""
        self._observed_at = -math.inf

    def observe_groups(self, ranks: Sequence[WorkerProcess]) -> None:
        """Note the memory cgroups of the ranks, once a second: a rank that has ended is in none."""
        now = time.monotonic()
        if now - self._observed_at < 1.0:
            return
        self._observed_at = now
        for pid in (rank.process.pid for rank in ranks if not rank.ended):
            group = None if pid is None else read_memory_group(pid=pid)
            if pid is None or group is None or group == self._group:
                continue
            own = self._own_groups.get(pid)
            kills = group.oom_kills() if own is None or own.group != group else own.oom_kills
            self._own_groups[pid] = _OwnGroup(group=group, oom_kills=kills, limit=group.limit())

    def add(self, time_ns: int, assignment: RankAssignment, failure: Failure) -> None:
        """Add the failure that a rank has reported."""
        if failure.kind == "exception" and is_lost_peer(failure.message):
            traceback = failure.traceback or failure.message
            text = lost_peer_text(failure.message)
            failure = msgspec.structs.replace(failure, kind="lost_peer", message=text, traceback=traceback)
        self.failures.append((time_ns, msgspec.structs.replace(failure, rank=assignment.rank, host=assignment.host)))

    def fail(self, assignment: RankAssignment, kind: str, message: str) -> None:
        """Record a failure that the rank could not record itself."""
        self._record(assignment.failure(kind, message))
        self._writer.write(assignment.state("failed", message=message))

    def _record(self, failure: Failure) -> None:
        self.failures.append((time.time_ns(), failure))
        self._writer.write(failure)

    def finish(self, rank: WorkerProcess) -> None:
        """Record the success of a script that exited with 0 and did not report it.

        It called ``os._exit(0)``, replaced itself by another program, or closed the pipe of its reports with all other
        descriptors; in the last case its success is already in the record. Peers that lose such a rank may report that
        before its end is known here, so its time is that of its last event.
        """
        rank.finished_at, rank.finished_ns = time.monotonic(), time.time_ns()
        assignment = rank.assignment
        if assignment.run_dir is None:
            return
        events = RunDir(assignment.run_dir).rank_events(assignment.rank)
        last = _last_event(events)
        ended = time.time() if last is None else last.time
        rank.finished_ns = int(ended * 1e9)
        if not (isinstance(last, RankState) and last.state == "finished"):
            writer = EventWriter(events, rank=assignment.rank)
            writer.write(RankState(time=ended, rank=assignment.rank, state="finished"))
            writer.close()

    def report_death(self, rank: WorkerProcess) -> None:
        """Record that a rank ended without a report, with its exit code and the last error in its log."""
        assert rank.exit_code is not None
        error = last_error(rank.assignment.log, since=rank.log_from)
        if rank.exit_code >= 0:
            message = f"the process ended with exit code {rank.exit_code} before its training was complete"
            # A script that lost a peer ends with an exception about the connection.
            kind = "lost_peer" if is_lost_peer(error) else "exit"
            self.fail(rank.assignment, kind, f"{message}: {lost_peer_text(error)}" if error else message)
            return
        message = f"the process was ended by {signal_name(-rank.exit_code)}"
        kind, sender = self._kill_cause(-rank.exit_code, rank.process.pid)
        message += sender or (error and f": {lost_peer_text(error)}")
        if kind == "out_of_memory" and rank.assignment.spec is not None:
            message += less_memory(rank.assignment.spec.training, rank.assignment.world_size)
        # NCCL's watchdog ends a process whose collective took too long.
        if rank.assignment.run_dir is not None:
            collectives = RunDir(rank.assignment.run_dir).rank_collectives(rank.assignment.rank)
            if collectives.is_file():
                message += f"; its last collectives are in {collectives}"
        self.fail(rank.assignment, "lost_peer" if is_lost_peer(error) else kind, message)

    def server_ended(self, host: str, number: int | None) -> None:
        """Record that the fork server has ended, and all ranks with it; ``number`` is the signal that killed it."""
        end = "ended" if number is None else f"was ended by {signal_name(number)}"
        kind, sender = self._kill_cause(number)
        message = f"the fork server, the parent of all ranks on this node, {end}{sender}"
        self._record(Failure(time=time.time(), kind=kind, message=message, host=host))

    def _kill_cause(self, number: int | None, pid: int | None = None) -> tuple[str, str]:
        """Return the kind of failure and the sender of SIGKILL for a message; no sender for other signals."""
        if number != signal.SIGKILL:
            return "signal", ""
        own = None if pid is None else self._own_groups.get(pid)
        if own is not None and (own.group.oom_kills() > own.oom_kills or (own.is_gone and self._any_oom_kill())):
            return "out_of_memory", f" by the kernel's out-of-memory killer{self._limit_text(own.limit)}"
        if self._group is not None and self._group.oom_kills() > self._group_oom_kills:
            return "out_of_memory", f" by the kernel's out-of-memory killer{self._limit_text(self._group.limit())}"
        if self._any_oom_kill():
            return "signal", ": the kernel's out-of-memory killer ended a process at that time"
        return "signal", ": sent by hand, by a scheduler, or because of a memory limit"

    def _any_oom_kill(self) -> bool:
        """Return whether the kernel has ended a process on this machine for want of memory since the start."""
        return oom_kills() > self._oom_kills

    def _limit_text(self, limit: tuple[int, Path] | None) -> str:
        if limit is None:
            return ""
        size, holder = limit
        shared = self._group is not None and self._group.folder.is_relative_to(holder)
        whose = "for the processes of this node" if shared else f"of its own cgroup {holder}"
        return f", at the limit of {size >> 20} MiB {whose}"

    def outcome(
        self, first: RankAssignment, ranks: Sequence[WorkerProcess], shutdown: Shutdown, stop_reason: str
    ) -> NodeOutcome:
        """Return the outcome of the node, from the assignment of its first rank and the ranks that were started."""
        failure = root_cause(self.failures)
        if failure is not None and failure.kind == "lost_peer" and len(ranks) == first.world_size:
            failed = {each.rank for _, each in self.failures}
            others = [rank for rank in ranks if rank.assignment.rank not in failed]
            failure = _lost_rank_failure(others, failure) or failure
        complete = bool(ranks) and all(rank.finished_at is not None for rank in ranks)
        orderly = [rank.stopped for rank in ranks if rank.stopped is not None]
        if (shutdown.stopped or (orderly and failure is None)) and not complete:
            # Ranks that lose their peers while all are being stopped have not failed.
            code, failure = ExitCode.STOPPED, None
        elif failure is not None:
            code = exit_code_of(failure)
        else:
            assert complete
            code = ExitCode.FINISHED
        return NodeOutcome(
            node=first.node,
            host=first.host,
            exit_code=code,
            ranks={rank.assignment.rank: rank.outcome() for rank in ranks},
            failure=failure,
            stopped_at=max((report.step for report in orderly if report.step is not None), default=None),
            saved=next((report.saved for report in orderly if report.saved is not None), None),
            not_kept=next((report.not_kept for report in orderly if report.not_kept), self._lost_checkpoint()),
            unanswered=shutdown.unanswered,
            killed=shutdown.killed,
            stop_reason=stop_reason,
            not_recorded=self.not_recorded,
        )

    def _lost_checkpoint(self) -> str:
        """Return the message of a failed save after the last update, or an empty string; a stop may follow it."""
        lost = (failure.message for _, failure in self.failures if failure.kind == "checkpoint_lost")
        return next(lost, "").removeprefix("trained, but ")


def _last_event(events: Path) -> AnyEvent | None:
    """Return the last event of a rank's record; None if there is none that can be read."""
    last_bytes = 4096  # bytes to read of a record's end: enough for the last ``rank_state`` event
    try:
        return next(iter(decode_events(read_tail(events, last_bytes))[-1:]), None)
    except OSError:
        return None


def _lost_rank_failure(ranks: Sequence[WorkerProcess], lost: Failure) -> Failure | None:
    """Return the failure of the rank that its peers have lost, in a run on one node; None if it is not known.

    Args:
        ranks: ranks without a failure of their own.
        lost: the first failure, of kind ``lost_peer``.
    """
    gave_up = f"rank {lost.rank} gave up: {lost.message}"
    early = [rank for rank in ranks if rank.finished_at is not None and rank.finished_ns / 1e9 <= lost.time]
    unreported = [rank for rank in ranks if rank.unreported]
    for absent, kind, predicate in (
        (early, "left_early", "had exited with code 0 while others were still training"),
        (unreported, "silent", "reported nothing"),
    ):
        if absent:
            message = f"{ranks_text([rank.assignment.rank for rank in absent])} {predicate}; {gave_up}"
            return msgspec.structs.replace(absent[0].assignment.failure(kind, message), time=lost.time)
    return None
