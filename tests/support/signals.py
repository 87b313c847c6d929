"""What tests need to know of signals that were sent, and a process that none reaches."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

PTRACE_ATTACH = 16
WALL = 0x40000000


def is_pending(pid: int, number: int) -> bool:
    """Whether a signal that was sent to a process has not reached it yet; one that has ended hears no more."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    if any(line.startswith("State:\tZ") for line in lines):
        return False
    sets = [line.split()[1] for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(int(each, 16) >> (number - 1) & 1 for each in sets)


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """Hold a process as a debugger does, until it is killed: no other signal reaches it, also no SIGCONT."""
    libc = ctypes.CDLL(None, use_errno=True)
    held, refused = threading.Event(), list[int]()

    def hold() -> None:
        if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
            refused.append(ctypes.get_errno())
        else:
            os.waitpid(pid, WALL)
        held.set()
        if not refused:
            with contextlib.suppress(ChildProcessError):  # its parent was faster
                os.waitpid(pid, WALL)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    if refused:
        pytest.skip(f"this user may not trace processes: {os.strerror(refused[0])}")
    yield
    thread.join(30)
    assert not thread.is_alive(), "nobody killed it"
