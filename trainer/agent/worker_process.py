"""Worker process from the node agent's side: start, reports, signals, outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import msgspec

from trainer.agent import worker_entry
from trainer.agent.assignment import STOP, PipeSink, RankAssignment
from trainer.agent.code_position import CodePosition
from trainer.contract.outcome import RankOutcome, RankReport, signal_name
from trainer.contract.record.regular_file import size_of


class StartedProcess:
    """Process of a rank that a script has started, which is no child of this one."""

    def __init__(self, pid: int) -> None:
        """Raises: ProcessLookupError: it has ended."""
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)
        """Descriptor that is readable once the process has ended."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs, else 0: only its parent learns its exit code."""
        return 0 if select.select([self.sentinel], [], [], 0)[0] else None


@dataclass
class WorkerProcess:
    """Process of a rank, with the state from its reports."""

    assignment: RankAssignment
    process: BaseProcess | StartedProcess
    reports: Connection
    log_from: int
    """Size of the log at the start of the process, in bytes."""
    finished_at: float | None = None
    """Time at which its success was received, on the monotonic clock."""
    finished_ns: int = 0
    """Time of its success by its report, nanoseconds of the Unix clock."""
    failed: bool = False
    stoppable: bool = False
    """Whether it saves its work on a stop request."""
    step_s: float = 0.0
    """Recent duration of its steps."""
    position: CodePosition = field(default_factory=CodePosition)
    stack_requests: Connection | None = None
    handles_stack_signal: bool = False
    """Whether the script handles the signal on which stacks are printed."""
    stopping: bool = False
    """Whether it has answered a stop request."""
    stopped: RankReport | None = None
    """Its report that it has saved and exits."""
    stopped_at: float | None = None
    """Time at which that report was received, on the monotonic clock."""
    by_script: bool = False
    """Whether the script has started it, and not the node agent."""
    ended: bool = False
    exit_code: int | None = None

    @property
    def done_at(self) -> float | None:
        """Time of its report ``finished`` or ``stopped``, after which only its exit is left, on the monotonic clock."""
        return self.finished_at if self.stopped is None else self.stopped_at

    @property
    def unreported(self) -> bool:
        """Whether it has reported neither success, nor a stop, nor a failure."""
        return self.finished_at is None and self.stopped is None and not self.failed

    def request_stop(self) -> None:
        """Send it a stop request, ignored if it has ended."""
        with contextlib.suppress(OSError):
            self.reports.send_bytes(STOP)

    def request_stacks(self) -> None:
        """Ask it for the stacks of its threads, ignored if it has ended."""
        if self.stack_requests is not None:
            with contextlib.suppress(OSError):
                self.stack_requests.send_bytes(b"stacks")

    def poll_reports(self) -> list[RankReport]:
        reports: list[RankReport] = []
        try:
            while not self.reports.closed and self.reports.poll():
                reports.append(msgspec.json.decode(self.reports.recv_bytes(), type=RankReport))
        except (EOFError, OSError):
            self.reports.close()
        return reports

    def signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if not self.ended and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def outcome(self) -> RankOutcome:
        number = -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None
        return RankOutcome(
            exit_code=self.exit_code if number is None else None,
            signal=None if number is None else signal_name(number),
            finished=self.finished_at is not None,
        )


def start_worker(context: BaseContext, assignment: RankAssignment, target: str) -> WorkerProcess | None:
    """Start a rank's process; return None if the fork server has ended."""
    log_from = 0 if assignment.log is None else size_of(assignment.log)
    reports, pipe = context.Pipe(duplex=True)
    requests, stack_requests = context.Pipe(duplex=False)
    sink = PipeSink(pipe)
    for_worker = dataclasses.replace(
        assignment,
        parent_pid=os.getpid(),
        report=sink,
        stop_requested=sink.stop_requested,
        starts_ranks=sink.starts_ranks,
        stack_requests=requests,
    )
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=worker_entry.enter, args=(target, for_worker), name=f"rank-{assignment.rank}"
    )
    try:
        process.start()
    except (EOFError, ConnectionError):
        return None
    finally:
        pipe.close()
        requests.close()
    return WorkerProcess(assignment, process, reports, log_from, stack_requests=stack_requests)
