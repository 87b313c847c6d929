"""Stacks that ``faulthandler`` prints on a signal, without the help of the interpreter: of ranks and loader workers."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from trainer.agent.code_position import without_start
from trainer.contract.record import CodeFrame, ThreadStack
from trainer.contract.record.code_stacks import is_worker_loop
from trainer.contract.record.regular_file import read_part
from trainer.host.proc_files import PROC
from trainer.host.process_guard import FORK_STACKS, prints_on_signal
from trainer.host.processes import children
from trainer.host.stop_request import STACK_SIGNAL
from trainer.host.user_code import is_user_code, shown_file

POLL_S = 0.1
"""Time between two looks for stacks that are due."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_HEADING = re.compile(r"(?:Current thread|Thread) (?P<name>0x[0-9a-f]+).*\(most recent call first\):")


def printed_stacks(log: Path | None, begin: int) -> list[ThreadStack]:
    """Return the stacks that ``faulthandler`` has printed into a log after byte ``begin``, the main thread first."""
    return [ThreadStack(thread.name, without_start(thread.frames)) for thread in _printed(log, begin)]


def _printed(log: Path | None, begin: int) -> list[ThreadStack]:
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
    return threads[-1:] + threads[:-1]  # it prints the newest thread first; the main thread is the oldest


class LoaderWorkers:
    """Stacks of the worker processes of a rank's DataLoader.

    Processes that were forked from the rank print them into one file, so they are asked one after another. A worker
    that was spawned has no such file: the signal would end it.
    """

    PRINT_S = 0.5
    """Time for a worker to print; one that waits for a dead file server never does."""
    ALL_S = 2.5
    """Time after which no further worker is asked, so that the rank's own answer comes in time."""

    def __init__(self, rank_pid: int) -> None:
        files = {pid: _file_of_forks(pid) for pid in children(rank_pid)}
        forked = [(pid, file) for pid, file in files.items() if file is not None and prints_on_signal(pid)]
        self._left = forked
        self._end = time.monotonic() + self.ALL_S
        self._signalled_at: float | None = None
        """Time at which the first of those that are left has got the signal, on the monotonic clock."""
        self.stacks: list[ThreadStack] = []
        """Stacks by process, from its task inwards."""

    def poll(self) -> bool:
        """Read the stack of one worker and ask the next; return whether that was the last one."""
        if self._signalled_at is not None:
            pid, file = self._left[0]
            frames = next((thread.frames for thread in _printed(file, 0)), [])
            if not frames and time.monotonic() - self._signalled_at < self.PRINT_S:
                return False
            loop = next((index for index, frame in enumerate(frames) if is_worker_loop(frame)), None)
            if loop is not None:
                self.stacks.append(ThreadStack(f"worker process {pid}", frames[:loop]))
            del self._left[0]
            self._signalled_at = None
        if not self._left or time.monotonic() > self._end:
            return True
        pid, file = self._left[0]
        self._signalled_at = time.monotonic()
        with suppress(OSError):  # it has ended
            os.truncate(file, 0)
            os.kill(pid, STACK_SIGNAL)
        return False


def _file_of_forks(pid: int) -> Path | None:
    """Return the file into which a process prints its stacks if it was forked from a rank; else None."""
    folder = PROC / str(pid) / "fd"
    with suppress(OSError):  # it has ended
        for descriptor in os.listdir(folder):  # noqa: PTH208 - names, which are links to no paths
            if os.readlink(folder / descriptor).startswith(f"/memfd:{FORK_STACKS} "):  # noqa: PTH115 - likewise
                return folder / descriptor
    return None
