"""Check for pending signals, and hold a process so that no signal reaches it."""

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
    """Return whether a signal sent to a process is still pending; False for a process that has ended."""
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
    """Hold a process with ptrace until it is killed: no other signal reaches it, not even SIGCONT."""
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
    assert not thread.is_alive(), "the process was not killed"
