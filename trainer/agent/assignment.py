"""The assignment that a worker process gets at its start, and the pipe through which it reports."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec

from trainer.contract.options import Distributed
from trainer.contract.outcome import RankReport
from trainer.contract.owned_descriptor import OwnedDescriptor
from trainer.contract.record import Failure, RankState

ReportSink = Callable[[RankReport], None]
"""Takes a rank's reports."""


class PipeSink:
    """Sends reports to the node agent, which is a process of its own, unless it is gone or a script closed the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._descriptor = OwnedDescriptor(pipe.fileno())

    def __reduce__(self) -> tuple[type[PipeSink], tuple[Connection]]:
        """Make a new one where the pipe has another descriptor, in the process that reports."""
        return PipeSink, (self._pipe,)

    def __call__(self, report: RankReport, /) -> None:
        """Send a report."""
        if self._descriptor.is_unchanged:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._pipe.send_bytes(msgspec.json.encode(report))

    def stop_requested(self) -> bool:
        """Whether the node agent has sent a stop request, which is all it ever sends and stays in the pipe."""
        return self._descriptor.is_unchanged and self._pipe.poll()


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """One rank's place in the run."""

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
    """For the record: ``cpu`` or ``cuda:<index> <UUID or name>``."""
    init_method: str | None
    """None when the world is one rank."""
    backend: Literal["nccl", "gloo"]
    parent_pid: int | None
    """The node agent, with which the rank dies; None when this process is the rank."""
    distributed: Distributed
    words: tuple[str, ...]
    """The flags that are not ``Distributed``'s: training and task options."""
    run_dir: str | None
    run_id: str
    """Equal on all nodes of a run and on no other's; empty when typed by hand without a run directory."""
    report: ReportSink
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the rank is to save and leave."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set in the rank's environment; None removes one."""
    terminal: int | None = None
    """Descriptor to which the rank's narration goes besides its log: where a person typed the command, rank 0's."""
    is_script: bool = False
    """Whether ``words`` are a script and its arguments, which has succeeded when it exits with 0 and no report."""

    def spawned(self, pid: int | None) -> RankState:
        """Return the event that the rank's process exists."""
        return RankState(
            time=time.time(),
            rank=self.rank,
            state="spawned",
            local_rank=self.local_rank,
            node=self.node,
            host=self.host,
            device=self.device,
            pid=pid,
        )

    def stoppable(self) -> None:
        """Report that from here on the rank saves its work when it is to stop."""
        self.report(RankReport(stoppable=True))

    def step_took(self, seconds: float) -> None:
        """Report how long steps take of late: a stop request is answered after a step."""
        self.report(RankReport(step_s=seconds))

    def stopping(self) -> None:
        """Report that the rank saves its work, which takes as long as the disk takes, and then leaves."""
        self.report(RankReport(stopping=True))

    def stopped(self, step: int | None, saved: Path | None, *, not_kept: str = "", not_recorded: str = "") -> None:
        """Report, before the teardown, where the rank stopped and what it has saved."""
        path = (
            None if saved is None else os.fsencode(saved).decode(errors="backslashreplace")
        )  # names need not be UTF-8
        not_kept = not_kept.encode(errors="backslashreplace").decode()
        self.report(RankReport(stopped=True, step=step, saved=path, not_kept=not_kept, not_recorded=not_recorded))

    def finished(self, *, not_recorded: str = "") -> None:
        """Report, before the teardown, that the training is complete: from here on exit codes do not matter."""
        self.report(RankReport(finished=True, time_ns=time.time_ns(), not_recorded=not_recorded))

    def failed(self, failure: Failure, *, not_recorded: str = "") -> None:
        """Report, before the teardown, why this rank failed; the node agent prints it if it is the cause."""
        self.report(RankReport(failure=failure, time_ns=time.time_ns(), not_recorded=not_recorded))
