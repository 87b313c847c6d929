"""What became of a node's ranks: gathers what failed, also what a dead rank cannot say, and judges over all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from trainer.errors import ExitCode
from trainer.node import memory
from trainer.node.assignment import RankAssignment
from trainer.node.last_words import error_in
from trainer.node.rank_process import RankProcess
from trainer.outcome import NodeOutcome, exit_code_of, is_lost_peer, root_cause, signal_name
from trainer.record import EventWriter, Failure, RankState, RunDir


class Verdict:
    """The failures of one node, in the order in which they were heard of."""

    def __init__(self, writer: EventWriter) -> None:
        self.failures: list[tuple[int, Failure]] = []
        """When they happened, nanoseconds of the Unix clock, and what they were."""
        self.not_recorded = ""
        """Why the end of a rank's record is not on disk."""
        self._writer = writer
        self._oom_kills = memory.oom_kills()

    def add(self, time_ns: int, assignment: RankAssignment, failure: Failure) -> None:
        """Take a rank's own word that it failed."""
        kind = failure.kind
        if kind == "exception" and is_lost_peer(failure.message):
            kind = "lost_peer"
        self.failures.append(
            (time_ns, msgspec.structs.replace(failure, kind=kind, rank=assignment.rank, host=assignment.host))
        )

    def fail(self, assignment: RankAssignment, kind: str, message: str) -> None:
        """Record a failure that the rank could not record itself."""
        now_ns = time.time_ns()
        failure = Failure(time=now_ns / 1e9, kind=kind, message=message, rank=assignment.rank, host=assignment.host)
        self.failures.append((now_ns, failure))
        self._writer.write(failure)
        self._writer.write(
            RankState(
                time=failure.time,
                rank=assignment.rank,
                state="failed",
                local_rank=assignment.local_rank,
                node=assignment.node,
                host=assignment.host,
                device=assignment.device,
                message=message,
            )
        )

    def finish(self, rank: RankProcess) -> None:
        """Record the success of a script that left by ``os._exit(0)`` or became another program."""
        rank.finished_at = time.monotonic()
        here = rank.assignment
        if here.run_dir is not None:
            writer = EventWriter(RunDir(here.run_dir).rank_events(here.rank), rank=here.rank)
            writer.write(RankState(time=time.time(), rank=here.rank, state="finished"))
            writer.close()

    def report_death(self, rank: RankProcess) -> None:
        """Record that a rank ended without a word, and what its exit and its log tell about it."""
        assert rank.exit_code is not None
        words = error_in(rank.log, since=rank.log_from)
        if rank.exit_code >= 0:
            message = f"the process ended with exit code {rank.exit_code} before its training was complete"
            self.fail(rank.assignment, "exit", f"{message}: {words}" if words else message)
            return
        name = signal_name(-rank.exit_code)
        message = f"the process was ended by {name}"
        if name == "SIGKILL" and memory.oom_kills() > self._oom_kills:
            message += ": the kernel's out-of-memory killer ended a process at that time"
        elif name == "SIGKILL":
            message += ": by hand, by a scheduler, or by a memory limit"
        elif words:
            message += f": {words}"
        self.fail(rank.assignment, "signal", message)

    def outcome(
        self, first: RankAssignment, ranks: Sequence[RankProcess], *, stopped: bool, unanswered: list[int]
    ) -> NodeOutcome:
        """Describe how the node ended.

        Args:
            first: of its ranks.
            ranks: those that were started.
            stopped: whether somebody asked for the end before anything failed.
            unanswered: ranks that did not answer to that.
        """
        failure = root_cause(self.failures)
        complete = bool(ranks) and all(rank.finished_at is not None for rank in ranks)
        orderly = [rank.stopped for rank in ranks if rank.stopped is not None]
        if (stopped or (orderly and failure is None)) and not complete:
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
            not_kept=next((report.not_kept for report in orderly if report.not_kept), self._not_kept()),
            unanswered=unanswered,
            not_recorded=self.not_recorded,
        )

    def _not_kept(self) -> str:
        """Return what a rank could not save after its last update: somebody may have asked for the end meanwhile."""
        told = (failure.message for _, failure in self.failures if failure.kind == "checkpoint_lost")
        return next(told, "").removeprefix("trained, but ")
