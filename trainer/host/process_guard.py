"""Death with the node agent, signal dispositions and output of a rank's process.

Torch-free, and called before torch does anything in the rank.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from trainer.contract.record.regular_file import OwnedDescriptor, open_to_append
from trainer.host.descendants import die_with_parent_process
from trainer.host.proc_files import PROC, read_text
from trainer.host.stop_request import NOW_SIGNAL, SAVE_SIGNALS, STACK_SIGNAL


def die_with_process(parent_pid: int) -> None:
    """Kill this process as soon as ``parent_pid`` has ended, even while it is blocked in a collective.

    The fork server dies with the node agent (``trainer.agent.preload_first``), and the kernel then kills the ranks that
    it forked. A thread watches ``parent_pid`` itself, for a rank whose fork server was killed alone.
    """
    die_with_parent_process()
    kill_at_end_of(parent_pid)


def kill_at_end_of(pid: int) -> None:
    """Kill this process as soon as another has ended, which a thread watches."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        _kill_self()
    else:
        threading.Thread(target=_watch, args=(handle,), name="parent-watch", daemon=True).start()


def _watch(handle: int) -> None:
    # A pidfd becomes readable when its process ends.
    waiter = select.poll()
    waiter.register(handle, select.POLLIN)
    while not waiter.poll():
        pass
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_signals(*, ignored: Collection[int] = ()) -> None:
    """Set a rank's signals: ignore SIGINT, SIGUSR1/2 and those given, print stacks on SIGQUIT, let the others kill.

    Default dispositions kill the rank even inside a collective, in which no Python handler would run.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(NOW_SIGNAL, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, *ignored):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVE_SIGNALS)
    print_stacks_on_signal()


FORK_STACKS = "gputrain-stacks"
"""Name of the file in memory into which processes that were forked from a rank print their stacks."""
_stacks_to = 2
"""Descriptor to which this process prints its stacks."""


def print_stacks_on_signal() -> None:
    """Print the Python stacks of all threads on STACK_SIGNAL, even while blocked in C++.

    They go to standard error, in a process that was forked from a rank to the file of ``print_stacks_of_forks``.
    """
    faulthandler.register(STACK_SIGNAL, file=_stacks_to, all_threads=True)


def prints_on_signal(pid: int) -> bool:
    """Whether a process catches the signal in its main thread, and does not block it there."""
    masks = dict(re.findall(r"^(SigBlk|SigCgt):\s+([0-9a-f]+)", read_text(PROC / str(pid) / "status"), re.MULTILINE))
    bit = 1 << (STACK_SIGNAL - 1)
    return bool(int(masks.get("SigCgt", "0"), 16) & bit) and not int(masks.get("SigBlk", "0"), 16) & bit


def print_stacks_of_forks() -> None:
    """Have processes that are forked from this one, such as loader workers, print theirs into a file in memory.

    In the rank's log they would be taken for its output. A script that handles the signal itself does so in its forks.
    """
    try:
        file = os.memfd_create(FORK_STACKS)
    except OSError:  # a sandbox forbids it: the forks' stacks stay unseen
        return
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    owned = OwnedDescriptor(file)

    def print_there() -> None:
        global _stacks_to
        # Neither after a script has closed the file, nor over its own handler: faulthandler's is no handler of Python.
        prints = prints_on_signal(os.getpid()) and not callable(signal.getsignal(STACK_SIGNAL))
        if prints and owned.is_unchanged:
            _stacks_to = file
            print_stacks_on_signal()

    os.register_at_fork(after_in_child=print_there)


def redirect_output(log: Path) -> None:
    """Redirect standard output and error of this process and its libraries to a file, appended line by line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    fd = open_to_append(log)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # UTF-8 whatever the encoding of the terminal is.
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BufferedWriter(LogFile(fd)), encoding="utf-8") for fd in (1, 2))
    print_by_line()


def print_by_line() -> None:
    """Flush output at the end of each line, so that a killed rank has shown all that it printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Escape characters that cannot be encoded, instead of failing in the middle of a training.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


class LogFile(io.FileIO):
    """File whose writes never fail: lost bytes are counted, and the count is written once the disk has space again."""

    def __init__(self, fd: int) -> None:
        """Write to an open descriptor, which ``close`` leaves open."""
        super().__init__(fd, "wb", closefd=False)
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: object, /) -> int:
        """Write as many bytes as the disk takes and count the rest as lost; return the size of ``data``."""
        rest = view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._lost_bytes:
                super().write(f"[{self._lost_bytes} bytes of output were lost: {self._why}]\n".encode())
                self._lost_bytes = 0
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._lost_bytes += len(rest)
            self._why = error.strerror or str(error)
        return len(view)
