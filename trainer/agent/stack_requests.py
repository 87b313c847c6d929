"""Answers of a node agent to requests for the Python stacks of its ranks.

A request is a new text in a file of the run directory. The agent asks a thread of each rank. A rank whose interpreter
is held answers nothing, so the agent then has ``faulthandler`` print the stacks on a signal, and reads them in the
rank's log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import structs

from trainer.agent.native_stacks import NativeReader
from trainer.agent.printed_stacks import POLL_S, LoaderWorkers, printed_stacks
from trainer.agent.worker_process import WorkerProcess
from trainer.contract.outcome import RankReport
from trainer.contract.record import NATIVE, Collective, EventWriter, RankStacks, RunDir, ThreadStack, read_stack_request
from trainer.contract.record.code_stacks import waits_for_worker
from trainer.contract.record.regular_file import size_of
from trainer.host.process_guard import prints_on_signal
from trainer.host.processes import is_held
from trainer.host.stop_request import STACK_SIGNAL

ANSWER_S = 0.7
"""Time for a rank's thread to answer, and for the stacks to be in the log after the signal."""


class StackRequests:
    """Requests for the stacks of a node's ranks, and the answers that are due."""

    def __init__(self, run_dir: RunDir, writer: EventWriter) -> None:
        self._dir = run_dir
        self._writer = writer
        self._request = read_stack_request(run_dir)
        self._due: dict[int, float] = {}
        """Rank to the time at which its answer is due, on the monotonic clock."""
        self._threads: dict[int, list[ThreadStack]] = {}
        """Rank to its stacks, for ranks whose answer is not complete."""
        self._collectives: dict[int, list[Collective]] = {}
        """Rank to its last collectives, likewise."""
        self._workers: dict[int, LoaderWorkers] = {}
        """Rank to the worker processes that it waits for, likewise."""
        self._log_from: dict[int, int] = {}
        """Rank to the size of its log before the signal, for ranks that have got one."""
        self._native = NativeReader()
        self._answers: dict[int, RankStacks] = {}
        """Rank to its answer, to which its native frames are to be added."""

    def poll(self, ranks: Iterable[WorkerProcess]) -> None:
        """Pass a new request on to the running ranks, and answer for those that have not."""
        now = time.monotonic()
        running = {rank.assignment.rank: rank for rank in ranks if not rank.ended}
        if (request := read_stack_request(self._dir)) != self._request and request:
            self._request = request
            for unfinished in (self._log_from, self._threads, self._collectives, self._workers):
                unfinished.clear()
            self._due = dict.fromkeys(running, now + ANSWER_S)
            for rank in running.values():
                rank.request_stacks()
        for number, due in list(self._due.items()):
            if number not in running:
                del self._due[number]
            elif now >= due:
                self._overdue(running[number])
        for number, stacks in self._native.take().items():
            self._writer.write(
                structs.replace(
                    self._answers.pop(number), time=time.time(), native=stacks.threads, native_problem=stacks.problem
                )
            )

    @property
    def due_in_s(self) -> float | None:
        """Time until the next look for answers; None if none is due."""
        return POLL_S if self._due or self._native.is_reading else None

    def take(self, rank: WorkerProcess, report: RankReport) -> None:
        """Take a rank's report of its stacks, or of its last collectives, which completes its answer."""
        number = rank.assignment.rank
        if report.stacks:
            self._threads[number] = report.stacks
            pid, waits = rank.process.pid, waits_for_worker(report.stacks[0].frames)
            if waits and number in self._due and pid is not None and not rank.handles_stack_signal:
                self._workers[number] = LoaderWorkers(pid)
        elif number in self._threads:
            self._collectives[number] = report.collectives or []
            self._complete(rank)

    def _complete(self, rank: WorkerProcess) -> None:
        """Record the answer of a rank whose stacks have come, once the workers that it waits for have been asked."""
        number = rank.assignment.rank
        workers = self._workers.get(number)
        if number in self._due and workers is not None and not workers.poll():
            self._due[number] = time.monotonic()
        else:
            stacks = workers.stacks if workers is not None else []
            self._answer(rank, self._threads[number], collectives=self._collectives.get(number, []), workers=stacks)

    def _answer(
        self,
        rank: WorkerProcess,
        threads: list[ThreadStack],
        problem: str = "",
        *,
        collectives: Sequence[Collective] = (),
        workers: Sequence[ThreadStack] = (),
    ) -> None:
        """Record the answer of a rank, or why there is none."""
        number, pid = rank.assignment.rank, rank.process.pid
        if self._due.pop(number, None) is None:
            return
        answer = RankStacks(
            time=time.time(),
            rank=number,
            host=rank.assignment.host,
            request=self._request,
            pid=pid,
            threads=threads,
            problem=problem,
            collectives=list(collectives),
            workers=list(workers),
        )
        self._writer.write(answer)
        if self._request.endswith(NATIVE) and pid is not None:
            self._answers[number] = answer
            self._native.start(number, pid)

    def _overdue(self, rank: WorkerProcess) -> None:
        number, pid = rank.assignment.rank, rank.process.pid
        if number in self._threads:  # without its collectives, if these have not come: torch's lock is taken
            self._complete(rank)
        elif self._native.reads(number):  # its process is stopped meanwhile
            self._due[number] = time.monotonic() + ANSWER_S
        elif number in self._log_from:
            threads = printed_stacks(rank.assignment.log, self._log_from[number])
            self._answer(rank, threads, "the interpreter is held" if threads else "no answer")
        elif pid is None or is_held(pid):
            self._answer(rank, [], "the process is stopped (state T)")
        elif rank.handles_stack_signal:
            self._answer(rank, [], f"the interpreter is held, and the script handles {STACK_SIGNAL.name} itself")
        elif rank.assignment.log is None or not prints_on_signal(pid):
            self._answer(rank, [], f"the interpreter is held, and the process does not take {STACK_SIGNAL.name}")
        else:
            self._log_from[number] = size_of(rank.assignment.log)
            self._due[number] = time.monotonic() + ANSWER_S
            with suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
