"""Native frames of ranks by py-spy or pystack, where one of them is installed on this host.

Either stops the process while it reads the stacks, for 40 to 250 ms on a CPU, so that they run on request only.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer.agent.code_position import MAX_FRAMES, MAX_THREADS, without_start
from trainer.contract.record import CodeFrame, ThreadStack
from trainer.host.processes import is_held
from trainer.host.user_code import is_user_code, shown_file

TIMEOUT_S = 10.0
"""Time for one rank: large libraries have many symbols to read."""
AT_ONCE = 4
"""Ranks that are read at the same time."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "py-spy": ("dump", "--native", "--json", "--pid"),
    "pystack": ("remote", "--native"),
}
"""Program to its arguments, to which the process id is added; the first one that is installed is used."""
FOLDERS = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
"""Where the programs are looked for: beside this Python, then as a shell does."""
MAX_NAME = 120
"""Most characters of a function's name, which in C++ has the types of its arguments."""
_FRAME = re.compile(
    r'\s+\((?:C|Python)\) File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.+?)(?: \(inlined\))?(?: \(/.*\))?'
)


class NativeStacks(NamedTuple):
    """Stacks of a process with their native frames, or why there are none."""

    threads: list[ThreadStack]
    problem: str = ""


class NativeReader:
    """Reads the native frames of processes on threads of its own, for a caller that must not wait."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._read: dict[int, Future[NativeStacks]] = {}

    def start(self, rank: int, pid: int) -> None:
        """Begin to read the stacks of a rank, unless that is being done."""
        self._pool = self._pool or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="native-stacks")
        if rank not in self._read:
            self._read[rank] = self._pool.submit(read_native_stacks, pid)

    @property
    def is_reading(self) -> bool:
        """Whether a rank's stacks are still to be taken."""
        return bool(self._read)

    def reads(self, rank: int) -> bool:
        """Whether the stacks of a rank are being read, for which its process is stopped."""
        return rank in self._read and not self._read[rank].done()

    def take(self) -> dict[int, NativeStacks]:
        """Return the stacks that have been read since the last call, by rank."""
        done = [rank for rank, future in self._read.items() if future.done()]
        return {rank: self._read.pop(rank).result() for rank in done}


def read_native_stacks(pid: int) -> NativeStacks:
    """Return the stacks of a process of this host, the main thread first; a process that is stopped is left alone."""
    folders = os.pathsep.join(FOLDERS)
    found = next(((name, path) for name in COMMANDS if (path := shutil.which(name, path=folders))), None)
    if found is None:
        return NativeStacks([], f"neither {' nor '.join(COMMANDS)} is installed on this host")
    if is_held(pid):
        return NativeStacks([], "the process is stopped")
    name, path = found
    try:
        done = subprocess.run(
            [path, *COMMANDS[name], str(pid)], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        if is_held(pid):  # the program was killed between stopping the process and letting it go on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return NativeStacks([], f"{name} took more than {TIMEOUT_S:g} s")
    except OSError as error:
        return NativeStacks([], f"{path} cannot be started: {error.strerror}")
    parse = threads_of_py_spy if name == "py-spy" else threads_of_pystack
    with suppress(ValueError, KeyError, TypeError):
        if threads := parse(done.stdout, pid):
            return NativeStacks(threads)
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return NativeStacks([], f"{name}: {said[-1]}" if said else f"{name} printed no stacks")


def threads_of_py_spy(printed: bytes, pid: int) -> list[ThreadStack]:
    """Return the stacks that py-spy prints as JSON, the main thread first.

    Raises:
        ValueError: they are no JSON.
        KeyError, TypeError: they have another structure.
    """
    found = []
    for thread in sorted(msgspec.json.decode(printed), key=lambda each: each["os_thread_id"] != pid)[:MAX_THREADS]:
        frames = [
            _frame(each["filename"] or each["module"] or "", each["line"] or 0, each["name"])
            for each in thread["frames"][:MAX_FRAMES]
        ]
        name = thread["thread_name"] or f"thread {thread['os_thread_id']}"
        found.append(ThreadStack(name, without_start(frames)))
    return found


def threads_of_pystack(printed: bytes, pid: int) -> list[ThreadStack]:
    """Return the stacks that pystack prints, the main thread first; it prints the outermost call first."""
    found: list[tuple[int, ThreadStack]] = []
    for line in printed.decode("utf-8", "replace").splitlines():
        if heading := re.match(r"Traceback for thread (\d+)(?: \((.+?)\))?", line):
            number = int(heading[1])
            found.append((number, ThreadStack(heading[2] or f"thread {number}", [])))
        elif found and (call := _FRAME.fullmatch(line)):
            found[-1][1].frames.insert(0, _frame(call["file"], int(call["line"]), call["function"]))
    found.sort(key=lambda each: each[0] != pid)
    return [ThreadStack(thread.name, without_start(thread.frames[:MAX_FRAMES])) for _, thread in found[:MAX_THREADS]]


def _frame(file: str, line: int, function: str) -> CodeFrame:
    function = function if len(function) <= MAX_NAME else f"{function[: MAX_NAME - 1]}…"
    if not line:  # a library without line numbers
        return CodeFrame(Path(file).name, 0, function)
    return CodeFrame(shown_file(file), line, function, file.endswith(".py") and is_user_code(file))
