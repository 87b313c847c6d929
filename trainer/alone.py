"""Runs a rank in this very process: under a launcher that started it, or where there is only one.

Nobody watches it from outside, so a thread answers to signals and to the lease, also while the rank sits in C++.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import select
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from trainer import child, guard
from trainer.assignment import RankAssignment
from trainer.descendants import kill_descendants
from trainer.errors import ExitCode
from trainer.outcome import NodeOutcome, RankOutcome, RankReport, exit_code_of
from trainer.record import EventWriter, Failure, RankState, RunDir
from trainer.stopping_signals import STOPPING, StopSignals

FLUSH_S = 0.15
"""A little more than the record's writer may hold events back, before a stopped rank leaves."""


def run_alone(assignment: RankAssignment, *, environ: Mapping[str, str], target: str = "trainer.rank:run_rank") -> int:
    """Run the rank to its end in this process and return its exit code."""
    run_dir = RunDir(assignment.run_dir) if assignment.run_dir is not None else None
    guard.print_stacks_on_signal()
    guard.adopt_orphans()
    with StopSignals(environ) as signals:
        alone = _Alone(assignment, run_dir, signals)
        threading.Thread(target=alone.obey, name="signals", daemon=True).start()
        if run_dir is not None:
            run_dir.node_result(assignment.node).unlink(missing_ok=True)
            alone.write_spawned()
            guard.redirect_output(run_dir.rank_log(assignment.rank))
        # Imports torch, which a fork server would have done for the rank.
        importlib.import_module("trainer.preload")
        code = child.run(target, dataclasses.replace(assignment, report=alone.report))
        alone.ended(code)
    kill_descendants()
    return code


class _Alone:
    """What the node's parent would do for the rank, were it another process."""

    def __init__(self, assignment: RankAssignment, run_dir: RunDir | None, signals: StopSignals) -> None:
        self._assignment = assignment
        self._run_dir = run_dir
        self._signals = signals
        self._terminal = os.dup(2)
        """Standard error as it was before the rank's log took its place."""
        self._told = False

    def write_spawned(self) -> None:
        """Record that the rank exists."""
        assert self._run_dir is not None
        here = self._assignment
        writer = EventWriter(self._run_dir.node_events(here.node))
        writer.write(
            RankState(
                time=time.time(),
                rank=here.rank,
                state="spawned",
                local_rank=here.local_rank,
                node=here.node,
                host=here.host,
                device=here.device,
                pid=os.getpid(),
            )
        )
        writer.close()

    def report(self, report: RankReport) -> None:
        """Take the rank's own word, before its teardown, which may never come back."""
        if report.finished:
            self._tell(ExitCode.FINISHED, finished=True)
        elif report.failure is not None:
            self._tell(exit_code_of(report.failure), failure=report.failure)

    def ended(self, code: int) -> None:
        """A rank that ended without a word has failed."""
        if self._told:
            return
        message = f"the rank ended with exit code {code} before its training was complete"
        here = self._assignment
        failure = Failure(time=time.time(), kind="exit", message=message, rank=here.rank, host=here.host)
        self._tell(ExitCode.FAILED, failure=failure)

    def obey(self) -> None:
        """Leave as soon as a signal or the end of the lease asks for it; on a thread of its own."""
        while True:
            select.select([self._signals.wake], [], [])
            try:
                numbers = self._signals.wake.recv(4096)
            except OSError:
                return
            if any(number in STOPPING for number in numbers):
                self._leave()

    def _leave(self) -> NoReturn:
        if not self._told:
            os.write(self._terminal, b"trainer: stopped\n")
            self._tell(ExitCode.STOPPED)
        time.sleep(FLUSH_S)
        kill_descendants(timeout_s=1.0)
        os._exit(ExitCode.STOPPED)

    def _tell(self, code: ExitCode, *, finished: bool = False, failure: Failure | None = None) -> None:
        """Write the node's outcome, where this rank is all of the node, and say what failed."""
        self._told = True
        here = self._assignment
        if failure is not None:
            line = f"trainer: rank {here.rank} on {here.host}: {failure.message}\n"
            os.write(self._terminal, line.encode(errors="backslashreplace"))
        if self._run_dir is not None and here.local_world_size == 1:
            outcome = RankOutcome(exit_code=code, finished=finished)
            NodeOutcome(
                node=here.node, host=here.host, exit_code=code, ranks={here.rank: outcome}, failure=failure
            ).write(self._run_dir.node_result(here.node))
