"""Assignment that a worker process gets at its start, and the pipe through which it reports."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec

from trainer.contract.options import Distributed, TrainingSpec
from trainer.contract.outcome import RankReport
from trainer.contract.record import Failure, RankState, RankStateName, RunDir
from trainer.contract.record.regular_file import OwnedDescriptor
from trainer.host.versions import installed_versions

STOP, STARTS_RANKS = b"stop", b"starts ranks"
"""Messages of the node agent to a rank: a stop request; processes that the rank has started have become ranks."""

ReportSink = Callable[[RankReport], None]
"""Receiver of a rank's reports."""


class PipeSink:
    """Sink that sends reports to the node agent; it drops them if the agent is gone or a script has closed the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._descriptor = OwnedDescriptor(pipe.fileno())
        self._lock = threading.Lock()  # the main thread and that of ``code_position`` report
        self._messages: set[bytes] = set()
        """Messages of the node agent so far."""

    def __reduce__(self) -> tuple[type[PipeSink], tuple[Connection]]:
        """Pickle the pipe alone: in the worker process it has another descriptor."""
        return PipeSink, (self._pipe,)

    def __call__(self, report: RankReport, /) -> None:
        if self._descriptor.is_unchanged:
            with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._pipe.send_bytes(msgspec.json.encode(report))

    def stop_requested(self) -> bool:
        """Whether the node agent has sent a stop request, or is gone."""
        return STOP in self._received()

    def starts_ranks(self) -> bool:
        """Whether processes that this one has started are ranks, by the node agent's message."""
        return STARTS_RANKS in self._received()

    def _received(self) -> set[bytes]:
        try:
            while self._descriptor.is_unchanged and self._pipe.poll():
                self._messages.add(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._messages.add(STOP)
        return self._messages


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """Place of a rank in the run, its options, and its connection to the node agent."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    """Index of the node in the plan."""
    host: str
    device_id: int | None
    """GPU as an index under CUDA_VISIBLE_DEVICES; None is the CPU."""
    device: str
    """Name in the record: ``cpu`` or ``cuda:<index> <UUID or name>``."""
    init_method: str | None
    """None in a world of one rank."""
    backend: Literal["nccl", "gloo"]
    parent_pid: int | None
    """Pid of the node agent, with which the rank dies; None if the rank runs in the agent's process."""
    distributed: Distributed
    run_dir: str | None
    run_id: str
    """Equal on all nodes of a run and different between runs; empty without a run directory and GPUTRAIN_RUN_ID."""
    report: ReportSink
    spec: TrainingSpec | None = None
    """What the rank trains; None for a script."""
    script_argv: tuple[str, ...] = ()
    """Script and arguments of a rank that runs one, with ``-m`` before a module."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the rank is to save and exit."""
    starts_ranks: Callable[[], bool] = lambda: False
    """Whether processes that the script has started are ranks in place of its own."""
    started_ranks_socket: str = ""
    """Socket of the node agent for processes of the script that may be ranks; empty for none."""
    must_start_ranks: bool = False
    """Whether the recipe says that the script starts its ranks."""
    stack_requests: Connection | None = None
    """Messages of the node agent, each of which asks for the rank's Python stacks."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set in the rank's environment; None removes one."""
    terminal: int | None = None
    """Descriptor that gets the messages besides the log; only of rank 0, if the command was typed by hand."""

    @property
    def is_script(self) -> bool:
        """Whether the rank runs a script; exit code 0 without a report then means success."""
        return bool(self.script_argv)

    @property
    def log(self) -> Path | None:
        """Log of the rank; None if it prints to the terminal."""
        return None if self.run_dir is None else RunDir(self.run_dir).rank_log(self.rank)

    def state(
        self, state: RankStateName, *, pid: int | None = None, threads: int | None = None, message: str | None = None
    ) -> RankState:
        """Return the event of a state of the rank."""
        return RankState(
            time=time.time(),
            rank=self.rank,
            state=state,
            local_rank=self.local_rank,
            node=self.node,
            host=self.host,
            device=self.device,
            pid=pid,
            threads=threads,
            message=message,
            versions=installed_versions() if state == "spawned" and self.local_rank == 0 else None,
        )

    def failure(self, kind: str, message: str) -> Failure:
        """Return a failure of the rank that is no exception."""
        return Failure(time=time.time(), kind=kind, message=message, rank=self.rank, host=self.host)

    def stoppable(self) -> None:
        """Report that from here on the rank saves its work on a stop request."""
        self.report(RankReport(stoppable=True))

    def step_took(self, seconds: float) -> None:
        """Report the recent duration of a step: the rank answers a stop request between steps."""
        self.report(RankReport(step_s=seconds))

    def stopping(self) -> None:
        """Report that the rank saves its work, for which it has ``SAVE_TIMEOUT_S``, and then exits."""
        self.report(RankReport(stopping=True))

    def stopped(self, step: int | None, saved: Path | None, *, not_kept: str = "", not_recorded: str = "") -> None:
        """Report, before the teardown, the step at which the rank stopped, its checkpoint and its unsaved work."""
        # File names need not be UTF-8.
        path = None if saved is None else os.fsencode(saved).decode(errors="backslashreplace")
        not_kept = not_kept.encode(errors="backslashreplace").decode()
        self.report(RankReport(stopped=True, step=step, saved=path, not_kept=not_kept, not_recorded=not_recorded))

    def finished(self, *, not_recorded: str = "") -> None:
        """Report, before the teardown, that the training is complete; its exit code then does not matter."""
        self.report(RankReport(finished=True, time_ns=time.time_ns(), not_recorded=not_recorded))

    def failed(self, failure: Failure, *, not_recorded: str = "", lost_pid: int | None = None) -> None:
        """Report, before the teardown, the failure of this rank; the node agent prints it if it is the root cause.

        ``lost_pid``: the process for whose end it failed.
        """
        self.report(RankReport(failure=failure, time_ns=time.time_ns(), not_recorded=not_recorded, lost_pid=lost_pid))
