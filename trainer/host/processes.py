"""Reads the facts of a process in ``/proc/PID``: state, parent, start, use of core and memory, environment.

Standard library only, since this file travels to remote hosts with ``inventory.py``. psutil, which reads the same
files, takes longer to import than all of these questions take, and does not know the waits for a core.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import PROC, read_bytes

CLOCK_TICKS_HZ = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second in ``/proc``."""


@dataclass(frozen=True)
class ProcessStat:
    """The line of ``/proc/PID/stat`` from its third field on; numbers are those of proc(5) less 3."""

    fields: list[bytes]

    @property
    def state(self) -> str:
        """One letter: R, S, D, T (stopped), t (traced), Z (zombie), X (dead)."""
        return self.fields[0].decode("ascii")

    @property
    def alive(self) -> bool:
        """Whether it does anything: a zombie is dead, whoever has yet to reap it."""
        # A process whose first thread has left shows that thread's state while others of it go on.
        return self.state not in "ZX" or (len(self.fields) > 17 and int(self.fields[17]) > 1)

    @property
    def parent_pid(self) -> int:
        """0 for the first process of a PID namespace."""
        return int(self.fields[1])

    @property
    def cpu_ticks(self) -> int | None:
        """Processor time of all its threads, user and system; None of a line that ends before."""
        return int(self.fields[11]) + int(self.fields[12]) if len(self.fields) > 12 else None

    @property
    def start_ticks(self) -> int:
        """Clock ticks from the start of the machine to that of the process."""
        return int(self.fields[19])

    @property
    def environ_address(self) -> int:
        """Address of its environment; 0 where the kernel hides it."""
        return int(self.fields[47])


def parse_stat(line: bytes) -> ProcessStat | None:
    """Read a line of ``/proc/PID/stat``; None where it does not even hold the state and the parent."""
    # The name stands in parentheses and may hold spaces and parentheses itself, so count from its end.
    fields = line.rpartition(b")")[2].split()
    return ProcessStat(fields) if fields else None


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """Return the state of a process; None when there is none of that number."""
    return parse_stat(read_bytes(proc / str(pid) / "stat"))


def pids(proc: Path = PROC) -> Iterator[int]:
    """Yield the number of every process."""
    for name in os.listdir(proc):  # noqa: PTH208 - thousands of names, of which few are read
        if name.isdecimal():
            yield int(name)


def exists(pid: int) -> bool:
    """Whether there is a process of that number, be it a zombie."""
    return (PROC / str(pid)).exists()


def is_held(pid: int) -> bool:
    """Whether a process is kept from running, by SIGSTOP or by a debugger, so that it hears no signal but SIGKILL."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


def ancestors() -> list[int]:
    """Return the parent of this process, its parent, and so on."""
    found: list[int] = []
    stat = read_stat(os.getpid())
    while stat is not None and stat.parent_pid > 0:
        found.append(stat.parent_pid)
        stat = read_stat(stat.parent_pid)
    return found


def descendants(pid: int) -> set[int]:
    """Return the living processes below ``pid``; zombies are dead, whoever has yet to reap them."""
    children: dict[int, list[int]] = {}
    for each in pids():
        stat = read_stat(each)
        if stat is not None and stat.alive:
            children.setdefault(stat.parent_pid, []).append(each)
    found: set[int] = set()
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def namespace(kind: str) -> int | None:
    """Return the number of a namespace (``net``, ``pid``) of this process; None where the kernel has none."""
    try:
        return (PROC / "self/ns" / kind).stat().st_ino
    except OSError:
        return None


# --- environment and owner ------------------------------------------------------------------------------------------


def read_environ(pid: int) -> bytes:
    """Return the environment that a process was started with; empty of a zombie, and of another user's process."""
    return read_bytes(PROC / str(pid) / "environ")


def environ_value(pid: int, name: str) -> bytes | None:
    """Return the value of a variable that a process was started with; None where there is none."""
    environ = read_environ(pid)
    prefix = f"{name}=".encode()
    if prefix not in environ:
        return None
    return next((entry[len(prefix) :] for entry in environ.split(b"\0") if entry.startswith(prefix)), None)


def owner_and_name(pid: int) -> tuple[str, str] | None:
    """Return the user and the program's name of a process; None of one that this machine cannot see."""
    folder = PROC / str(pid)
    try:
        uid = folder.stat().st_uid
        name = (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name, name
    except KeyError:
        return str(uid), name


# --- use of cores and memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Resource usage of one process since it began."""

    ticks: int | None
    """Processor time of all its threads, user and system."""
    rss_bytes: int | None
    wait_ns: int | None
    """Time that its main thread was runnable and did not run."""
    held: str | None = None
    """``T`` where it is stopped by a signal, ``t`` where a debugger holds it."""


def read_usage(pid: int, *, proc: Path = PROC) -> ProcessUsage | None:
    """Return the resource usage of a process; None when there is none of that number."""
    folder = proc / str(pid)
    stat = read_bytes(folder / "stat")
    if not stat:
        return None
    return parse_usage(
        stat, read_bytes(folder / "statm"), read_bytes(folder / "schedstat"), page_bytes=os.sysconf("SC_PAGE_SIZE")
    )


def parse_usage(stat: bytes, statm: bytes, schedstat: bytes, *, page_bytes: int) -> ProcessUsage:
    """Read ``/proc/PID/stat``, ``statm`` and ``schedstat``; an empty text is a file that is not there."""
    parsed, pages = parse_stat(stat), statm.split()
    return ProcessUsage(
        ticks=None if parsed is None else parsed.cpu_ticks,
        rss_bytes=int(pages[1]) * page_bytes if len(pages) > 1 else None,
        wait_ns=parse_wait_ns(schedstat),
        held=parsed.state if parsed is not None and parsed.state in "Tt" else None,
    )


def parse_wait_ns(schedstat: bytes) -> int | None:
    """Read of a ``schedstat`` how long the thread was runnable and did not run; None where it does not say."""
    words = schedstat.split()
    return int(words[1]) if len(words) == 3 else None


def busy_ns(pid: int, *, proc: Path = PROC) -> dict[str, int]:
    """Return for how long each thread of a process has run or waited for a core, by thread id."""
    try:
        threads = os.listdir(proc / str(pid) / "task")  # noqa: PTH208 - some hundred names
    except OSError:
        return {}
    files = {thread: read_bytes(proc / str(pid) / "task" / thread / "schedstat").split() for thread in threads}
    return {thread: int(words[0]) + int(words[1]) for thread, words in files.items() if len(words) > 1}


def sleeps_in(pid: int, *, proc: Path = PROC) -> str | None:
    """Return the function of the kernel in which a process sleeps; None where it runs, or the kernel hides it."""
    wchan = read_bytes(proc / str(pid) / "wchan").decode("ascii", "replace")
    return None if wchan in ("", "0") else wchan
