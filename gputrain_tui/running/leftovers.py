"""Finds what is left of a run on this machine by the mark in its processes' environment, and ends it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from trainer.record.regular_file import read_whole

MARK = "GPUTRAIN_RUN"
"""Environment variable that every process of a run has: its run directory."""
ALSO = "mark"
"""File of the run directory with the mark of processes that were started before it."""


def mark_also(run_dir: Path, name: str, value: str) -> None:
    """Note that processes of a run have another mark, because they were started before it."""
    (run_dir / ALSO).write_text(f"{name}={value}")


def _marks(run_dir: Path) -> set[bytes]:
    marks = {f"{MARK}={run_dir}".encode()}
    with suppress(OSError):
        marks.add(read_whole(run_dir / ALSO))
    return marks


def processes_of(run_dir: Path) -> list[int]:
    """Return the living processes of a run, supervisors excepted; zombies are dead."""
    marks = _marks(run_dir)
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in b"ZX" and not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return sorted(found)


def end(run_dir: Path, patience_s: float = 5.0) -> list[int]:
    """Kill every process of a run; return those that would not go."""
    deadline = time.monotonic() + patience_s
    while left := processes_of(run_dir):
        if time.monotonic() > deadline:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left
