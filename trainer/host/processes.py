"""Facts of a process from ``/proc/PID``: state, parent, start, use of cores and memory, environment.

Standard library only, since this file travels to remote hosts with ``inventory.py``. psutil reads the same files, but
its import takes longer than all of these readings, and it lacks the waits for a core.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer.host.proc_files import PROC, read_bytes

CLOCK_TICKS_HZ = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second in ``/proc``."""
RUN = "GPUTRAIN_RUN"
"""Environment variable of every process of a run that the console started: its run directory."""
SUPERVISOR = "GPUTRAIN_SUPERVISOR"
"""Environment variable of the supervisor of a run: its run directory."""


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
        """Whether the process runs; a zombie does not, even if its parent has yet to reap it."""
        # A process whose first thread has exited shows that thread's state, Z, while its other threads run.
        return self.state not in "ZX" or (len(self.fields) > 17 and int(self.fields[17]) > 1)

    @property
    def parent_pid(self) -> int:
        """Pid of the parent; 0 for the first process of a PID namespace."""
        return int(self.fields[1])

    @property
    def cpu_ticks(self) -> int | None:
        """Processor time of all its threads, user and system; None if the line is cut off."""
        return int(self.fields[11]) + int(self.fields[12]) if len(self.fields) > 12 else None

    @property
    def start_ticks(self) -> int:
        """Clock ticks from the start of the machine to that of the process."""
        return int(self.fields[19])


def parse_stat(line: bytes) -> ProcessStat | None:
    """Parse a line of ``/proc/PID/stat``; return None if it is empty."""
    # The name in parentheses may contain spaces and parentheses itself, so parse from its end.
    fields = line.rpartition(b")")[2].split()
    return ProcessStat(fields) if fields else None


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """Return the parsed ``/proc/PID/stat`` of a process; None if there is none with that pid."""
    return parse_stat(read_bytes(proc / str(pid) / "stat"))


def pids(proc: Path = PROC) -> Iterator[int]:
    """Yield the pid of every process."""
    for name in os.listdir(proc):  # noqa: PTH208 - thousands of names, of which few are read
        if name.isdecimal():
            yield int(name)


def exists(pid: int) -> bool:
    """Whether there is a process with that pid, even a zombie."""
    return (PROC / str(pid)).exists()


def is_held(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger, so that it handles no signal but SIGKILL."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


def ancestors() -> list[int]:
    """Return the parent of this process, its parent, and so on."""
    above: list[int] = []
    stat = read_stat(os.getpid())
    while stat is not None and stat.parent_pid > 0:
        above.append(stat.parent_pid)
        stat = read_stat(stat.parent_pid)
    return above


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process, zombies included, in ascending order.

    A child of this process that it does not reap meanwhile is in every answer from its start or adoption on.
    """
    if not _lists_children():
        return _scan_children().get(pid, [])
    listed = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):  # noqa: PTH208 - read in a loop against forking children
            listed += read_bytes(PROC / str(pid) / "task" / thread / "children").split()
    return sorted(map(int, listed))


def descendants(pid: int, *, keep: Collection[int] = ()) -> set[int]:
    """Return the pids of all living descendants of ``pid``, without zombies, ``keep`` and the descendants of those."""
    scanned = None if _lists_children() else _scan_children()
    below: set[int] = set()
    queue = [pid]
    while queue:
        parent = queue.pop()
        direct = children(parent) if scanned is None else scanned.get(parent, [])
        new = [child for child in direct if child not in below and child not in keep]
        below.update(new)
        queue += new
    return {each for each in below if (stat := read_stat(each)) is not None and stat.alive}


@cache
def _lists_children() -> bool:
    """Whether the kernel lists the children of a thread (``CONFIG_PROC_CHILDREN``), which is faster than a scan."""
    return (PROC / "self/task" / str(threading.get_native_id()) / "children").exists()


def _scan_children() -> dict[int, list[int]]:
    of_parent: dict[int, list[int]] = {}
    for each in sorted(pids()):
        if (stat := read_stat(each)) is not None:
            of_parent.setdefault(stat.parent_pid, []).append(each)
    return of_parent


def child_count(pid: int, *, proc: Path = PROC) -> int | None:
    """Return the number of a process's children; None where the kernel does not list them."""
    try:
        lists = [(task / "children").read_bytes() for task in (proc / str(pid) / "task").iterdir()]
    except OSError:
        return None
    return sum(len(pids_of_thread.split()) for pids_of_thread in lists)


def descendants_of_each(roots: Collection[int], *, proc: Path = PROC) -> dict[int, dict[int, int]]:
    """Return the clock ticks that each living descendant of each root has used, by root and pid; in one pass."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for each in pids(proc):
        stat = read_stat(each, proc)
        if stat is not None and stat.alive:
            parents[each], ticks[each] = stat.parent_pid, stat.cpu_ticks or 0
    of_root: dict[int, dict[int, int]] = {root: {} for root in roots}
    for pid in parents:
        above, seen = parents[pid], set[int]()
        while above in parents and above not in of_root and above not in seen:
            seen.add(above)
            above = parents[above]
        if above in of_root:
            of_root[above][pid] = ticks[pid]
    return of_root


def namespace(kind: str) -> int | None:
    """Return the inode number of a namespace (``net``, ``pid``) of this process; None if the kernel has none."""
    try:
        return (PROC / "self/ns" / kind).stat().st_ino
    except OSError:
        return None


# --- environment and owner ------------------------------------------------------------------------------------------


def environ_value(pid: int, name: str) -> bytes | None:
    """Return the value of a variable in a process's environment at its start.

    None without it, and for zombies and other users' processes.
    """
    environ = read_bytes(PROC / str(pid) / "environ")
    prefix = f"{name}=".encode()
    return next((entry[len(prefix) :] for entry in environ.split(b"\0") if entry.startswith(prefix)), None)


def run_of(pid: int, names: Sequence[str] = (SUPERVISOR, RUN)) -> str | None:
    """Return the run directory that the first of these variables in a process's environment names; None without one."""
    for name in names:
        value = environ_value(pid, name)
        if value is not None and value.startswith(b"/"):
            return os.fsdecode(value)
    return None


def is_same_directory(first: str, second: str) -> bool:
    """Whether two paths name the same directory, which may be deleted."""
    return first == second or os.path.realpath(first) == os.path.realpath(second)


def owner_and_name(pid: int) -> tuple[str, str] | None:
    """Return the user and the program's name of a process; None if it is not visible in ``/proc``."""
    folder = PROC / str(pid)
    try:
        uid = folder.stat().st_uid
        name = (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    return user_name(uid), name


def user_name(uid: int) -> str:
    """Return the name of a user, else the number as text."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


# --- use of cores and memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Resource usage of one process since it began."""

    ticks: int | None
    """Processor time of all its threads, user and system."""
    rss_bytes: int | None
    wait_ns: int | None
    """Time that its main thread was runnable without a core."""
    held: str | None = None
    """``T`` if it is stopped by a signal, ``t`` if by a debugger."""


def read_usage(pid: int, *, proc: Path = PROC) -> ProcessUsage | None:
    """Return the resource usage of a process; None if there is none with that pid, or it has no memory any more."""
    folder = proc / str(pid)
    stat = parse_stat(read_bytes(folder / "stat"))
    if stat is None:
        return None
    pages = read_bytes(folder / "statm").split()
    if len(pages) > 1 and pages[1] == b"0":
        return None  # it exits
    return ProcessUsage(
        ticks=stat.cpu_ticks,
        rss_bytes=int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else None,
        wait_ns=parse_wait_ns(read_bytes(folder / "schedstat")),
        held=stat.state if stat.state in "Tt" else None,
    )


def parse_wait_ns(schedstat: bytes) -> int | None:
    """Parse the time that a thread was runnable without a core from its ``schedstat``; None if that is malformed."""
    times = schedstat.split()
    return int(times[1]) if len(times) == 3 else None


def busy_ns(pid: int, *, proc: Path = PROC) -> dict[str, int]:
    """Return the time that each thread of a process has run or waited for a core, by thread id."""
    try:
        threads = os.listdir(proc / str(pid) / "task")  # noqa: PTH208 - some hundred names
    except OSError:
        return {}
    files = {thread: read_bytes(proc / str(pid) / "task" / thread / "schedstat").split() for thread in threads}
    return {thread: int(times[0]) + int(times[1]) for thread, times in files.items() if len(times) > 1}


def sleeps_in(pid: int, *, proc: Path = PROC) -> str | None:
    """Return the kernel function in which a process sleeps; None if it runs, or if the kernel hides the function."""
    wchan = read_bytes(proc / str(pid) / "wchan").decode("ascii", "replace")
    return None if wchan in ("", "0") else wchan
