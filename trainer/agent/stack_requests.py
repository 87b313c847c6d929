"""Answers of a node agent to requests for the Python stacks of its ranks.

A request is a new text in a file of the run directory. The agent asks a thread of each rank. A rank whose interpreter
is held answers nothing, so the agent then has ``faulthandler`` print the stacks on a signal, and reads them in the
rank's log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from trainer.agent.code_position import without_start
from trainer.agent.native_stacks import NativeReader
from trainer.agent.worker_process import WorkerProcess
from trainer.contract.outcome import RankReport
from trainer.contract.record import (
    NATIVE,
    CodeFrame,
    Collective,
    EventWriter,
    RankStacks,
    RunDir,
    ThreadStack,
    read_stack_request,
)
from trainer.contract.record.regular_file import read_part, size_of
from trainer.host.proc_files import PROC, read_text
from trainer.host.processes import is_held
from trainer.host.stop_request import STACK_SIGNAL
from trainer.host.user_code import is_user_code, shown_file

ANSWER_S = 0.7
"""Time for a rank's thread to answer, and for the stacks to be in the log after the signal."""
POLL_S = 0.1
"""Time between two looks for answers that are due."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_HEADING = re.compile(r"(?:Current thread|Thread) (?P<name>0x[0-9a-f]+).*\(most recent call first\):")


class StackRequests:
    """Requests for the stacks of a node's ranks, and the answers that are due."""

    def __init__(self, run_dir: RunDir, writer: EventWriter) -> None:
        self._dir = run_dir
        self._writer = writer
        self._request = read_stack_request(run_dir)
        self._due: dict[int, float] = {}
        """Rank to the time at which its answer is due, on the monotonic clock."""
        self._threads: dict[int, list[ThreadStack]] = {}
        """Rank to its stacks, for ranks whose collectives are still to come."""
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
            self._log_from.clear()
            self._threads.clear()
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
        elif number in self._threads:
            self._answer(rank, self._threads[number], collectives=report.collectives or [])

    def _answer(
        self,
        rank: WorkerProcess,
        threads: list[ThreadStack],
        problem: str = "",
        *,
        collectives: Sequence[Collective] = (),
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
        )
        self._writer.write(answer)
        if self._request.endswith(NATIVE) and pid is not None:
            self._answers[number] = answer
            self._native.start(number, pid)

    def _overdue(self, rank: WorkerProcess) -> None:
        number, pid = rank.assignment.rank, rank.process.pid
        if number in self._threads:  # its collectives have not come: torch's lock is taken
            self._answer(rank, self._threads[number])
        elif self._native.reads(number):  # its process is stopped meanwhile
            self._due[number] = time.monotonic() + ANSWER_S
        elif number in self._log_from:
            threads = printed_stacks(rank.assignment.log, self._log_from[number])
            self._answer(rank, threads, "the interpreter is held" if threads else "no answer")
        elif pid is None or is_held(pid):
            self._answer(rank, [], "the process is stopped (state T)")
        elif rank.handles_stack_signal:
            self._answer(rank, [], f"the interpreter is held, and the script handles {STACK_SIGNAL.name} itself")
        elif rank.assignment.log is None or not _prints_on_signal(pid):
            self._answer(rank, [], f"the interpreter is held, and the process does not take {STACK_SIGNAL.name}")
        else:
            self._log_from[number] = size_of(rank.assignment.log)
            self._due[number] = time.monotonic() + ANSWER_S
            with suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)


def printed_stacks(log: Path | None, begin: int) -> list[ThreadStack]:
    """Return the stacks that ``faulthandler`` has printed into a log after byte ``begin``, the main thread first."""
    if log is None:
        return []
    max_bytes = 256 << 10  # a stack has some kilobytes
    threads: list[ThreadStack] = []
    with suppress(OSError):
        for line in read_part(log, begin, max_bytes).decode("utf-8", "replace").splitlines():
            if heading := _HEADING.match(line):
                threads.append(ThreadStack(f"thread {heading['name']}", []))
            elif threads and (frame := _FRAME.fullmatch(line)):
                file = frame["file"]
                call = CodeFrame(shown_file(file), int(frame["line"]), frame["function"], is_user_code(file))
                threads[-1].frames.append(call)
    threads = [ThreadStack(thread.name, without_start(thread.frames)) for thread in threads]
    return threads[-1:] + threads[:-1]  # it prints the newest thread first; the main thread is the oldest


def _prints_on_signal(pid: int) -> bool:
    """Whether a process catches the signal in its main thread, and does not block it there."""
    masks = dict(re.findall(r"^(SigBlk|SigCgt):\s+([0-9a-f]+)", read_text(PROC / str(pid) / "status"), re.MULTILINE))
    bit = 1 << (STACK_SIGNAL - 1)
    return bool(int(masks.get("SigCgt", "0"), 16) & bit) and not int(masks.get("SigBlk", "0"), 16) & bit
