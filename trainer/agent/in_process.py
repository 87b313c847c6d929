"""The in-process agent: runs a rank in this very process, under a launcher or where there is only one.

Nobody watches it from outside, so a thread answers to signals and to the lease, also while the rank sits in C++.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from trainer.agent import worker_entry
from trainer.agent.assignment import RankAssignment
from trainer.agent.local_ranks import LocalRanks
from trainer.agent.node_sampler import NodeSampler, gpus_of
from trainer.contract.errors import ExitCode, narration_line
from trainer.contract.outcome import SAVE_TIMEOUT_S, NodeOutcome, RankOutcome, RankReport, describe_stop, exit_code_of
from trainer.contract.record import EventWriter, Failure, RunDir
from trainer.host import process_guard
from trainer.host.descendants import kill_descendants
from trainer.host.stop_signals import AT_ONCE, STOPPING, StopSignals

SAMPLE_S = 1.0
"""Time between two looks at the machine, when a record is kept."""
FLUSH_S = 0.15
"""A little more than the record's writer may hold events back, before a stopped rank leaves."""


def run_in_process(
    assignment: RankAssignment, *, environ: Mapping[str, str], target: str = "trainer.engine.worker:run_rank"
) -> int:
    """Run the rank to its end in this process and return its exit code."""
    run_dir = RunDir(assignment.run_dir) if assignment.run_dir is not None else None
    process_guard.print_stacks_on_signal()
    process_guard.adopt_orphans()
    with StopSignals(environ) as signals:
        alone = _InProcessAgent(assignment, run_dir, signals)
        threading.Thread(target=alone.obey, name="signals", daemon=True).start()
        if run_dir is not None:
            if assignment.local_world_size == 1:
                NodeOutcome.reserve(run_dir.node_result(assignment.node), ranks=1)
            alone.write_spawned()
            if assignment.local_rank == 0:
                threading.Thread(target=alone.look_at_the_machine, name="node-sampler", daemon=True).start()
            process_guard.redirect_output(run_dir.rank_log(assignment.rank))
        # Imports torch, which a fork server would have done for the rank.
        importlib.import_module("trainer.agent.preload_torch")
        code = worker_entry.run(
            target, dataclasses.replace(assignment, report=alone.report, stop_asked=alone.stop_asked)
        )
        code = alone.ended(code)
    # torch's DataLoader raises in this handler when one of its workers is killed, as the next line does.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_descendants()
    return code


class _InProcessAgent:
    """What the node agent would do for the rank, were it another process."""

    def __init__(self, assignment: RankAssignment, run_dir: RunDir | None, signals: StopSignals) -> None:
        self._assignment = assignment
        self._run_dir = run_dir
        self._signals = signals
        self._terminal = os.dup(2)
        """Standard error as it was before the rank's log took its place."""
        self._not_recorded = ""
        """Why the end of the rank's record is not on disk."""
        self._reported: ExitCode | None = None
        """How it ended, once that is said."""
        self._over = threading.Event()
        """Set when there is nothing left to look at."""
        self._listens = False
        self._asked = False
        self._patience_s = assignment.distributed.stop_grace
        """How long the rank may take once it is asked to stop."""
        self._leave_at: float | None = None
        """When the process leaves, after it was asked to stop; on the monotonic clock."""

    def write_spawned(self) -> None:
        """Record that the rank exists."""
        assert self._run_dir is not None
        assignment = self._assignment
        writer = EventWriter(self._run_dir.node_events(assignment.node), shared=True)
        writer.write(assignment.spawned(os.getpid()))
        writer.close()

    def look_at_the_machine(self) -> None:
        """Record once a second what the ranks of this node do to the machine; on a thread of its own.

        It waits in the kernel nearly all of the time, and holds the interpreter for less than a thousandth of it. The
        file is this machine's alone: lines of several writers would not keep apart on a network file system.
        """
        assert self._run_dir is not None
        assignment = self._assignment
        local_ranks = LocalRanks(self._run_dir, assignment.node, assignment.host, assignment.local_world_size)
        writer = EventWriter(self._run_dir.events / f"machine-{assignment.host}.ndjson")
        sampler = NodeSampler(assignment.node, assignment.host, local_ranks.pids, writer=writer, interval_s=SAMPLE_S)
        asked_gpus = False
        while not self._over.wait(SAMPLE_S):
            local_ranks.look()
            if local_ranks.complete and not asked_gpus:
                sampler.watch_gpus(gpus_of(local_ranks.devices))
                asked_gpus = True
            sampler.poll(time.time())

    def report(self, report: RankReport) -> None:
        """Take the rank's own word, before its teardown, which may never come back."""
        self._listens |= report.listens
        if report.stopping:
            self._patience_s = SAVE_TIMEOUT_S
            if self._leave_at is not None:
                self._leave_at = time.monotonic() + SAVE_TIMEOUT_S
        self._not_recorded = report.not_recorded
        if report.stopped:
            self._tell(ExitCode.STOPPED, stopped=report)
        elif report.finished:
            self._tell(ExitCode.FINISHED, finished=True)
        elif report.failure is not None and self._asked and report.failure.kind == "lost_peer":
            # A rank that loses its peers while all are being stopped has not failed.
            self._tell(ExitCode.STOPPED)
        elif report.failure is not None:
            self._tell(exit_code_of(report.failure), failure=report.failure)

    def ended(self, code: int) -> int:
        """Return the exit code of what the rank has said; one that ended without a word has failed."""
        if self._reported is not None:
            return self._reported
        message = f"the rank ended with exit code {code} before its training was complete"
        assignment = self._assignment
        failure = Failure(time=time.time(), kind="exit", message=message, rank=assignment.rank, host=assignment.host)
        self._tell(ExitCode.FAILED, failure=failure)
        return code

    def stop_asked(self) -> bool:
        """Whether the rank is to stop at the next occasion."""
        return self._asked

    def obey(self) -> None:
        """Leave when a signal or the end of the lease asks for it; on a thread of its own.

        A rank that trains has some time to keep its work first.
        """
        interrupts = 0
        while True:
            now = time.monotonic()
            if self._leave_at is not None and now >= self._leave_at:
                self._leave()
            ready, _, _ = select.select(
                [self._signals.wake], [], [], None if self._leave_at is None else self._leave_at - now
            )
            if not ready:
                continue
            try:
                numbers = self._signals.wake.recv(4096)
            except OSError:
                return
            requests = [number for number in numbers if number in STOPPING]
            if not requests:
                continue
            # The handlers, which tell these apart as well, wait while the rank is in C++.
            interrupts += requests.count(signal.SIGINT)
            if not self._listens or self._signals.at_once or AT_ONCE in requests or interrupts > 1:
                self._leave()
            if not self._asked:
                self._leave_at = time.monotonic() + self._patience_s
                self._asked = True

    def _leave(self) -> NoReturn:
        if self._reported is None:
            self._tell(ExitCode.STOPPED)
        time.sleep(FLUSH_S)
        kill_descendants(timeout_s=1.0)
        os._exit(ExitCode.STOPPED)

    def _tell(
        self,
        code: ExitCode,
        *,
        finished: bool = False,
        failure: Failure | None = None,
        stopped: RankReport | None = None,
    ) -> None:
        """Write the node's outcome, where this rank is all of the node, and say what failed or what was kept."""
        self._reported = code
        self._over.set()
        assignment = self._assignment
        if code == ExitCode.STOPPED:
            self._narrate(
                "stopped" if stopped is None else describe_stop(stopped.step, stopped.saved, stopped.not_kept)
            )
        if failure is not None:
            self._narrate(f"rank {assignment.rank} on {assignment.host}: {failure.message}")
        if self._run_dir is not None and assignment.local_world_size == 1:
            outcome = RankOutcome(exit_code=code, finished=finished)
            node = NodeOutcome(
                node=assignment.node,
                host=assignment.host,
                exit_code=code,
                ranks={assignment.rank: outcome},
                failure=failure,
                stopped_at=None if stopped is None else stopped.step,
                saved=None if stopped is None else stopped.saved,
                not_kept="" if stopped is None else stopped.not_kept,
                not_recorded=self._not_recorded,
            )
            with contextlib.suppress(OSError):  # a full disk takes nothing from how the rank ended
                node.write(self._run_dir.node_result(assignment.node))

    def _narrate(self, line: str) -> None:
        os.write(self._terminal, (narration_line(line, program="trainer") + "\n").encode(errors="backslashreplace"))
