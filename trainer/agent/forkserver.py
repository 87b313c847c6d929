"""The fork server from which a node's ranks fork, with torch loaded before.

The standard library's fork server with additions: its own environment, death with its parent, ``stop``, and a socket
without a name, so that no file is left even if this process is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from trainer.host.stop_request import SAVE_SIGNALS, signals_blocked

PRELOADED = ("trainer.agent.preload_first", "trainer.agent.preload_torch")
"""Modules that the server of tasks imports before it forks."""
COMPILER_PRELOADED = (*PRELOADED, "trainer.agent.preload_compiler")
"""The same where the ranks use torch's compiler, which takes as long to import as the rest of torch."""
FORK_SAFE = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment in which importing torch starts no thread and does not initialise CUDA: neither survives a fork."""
NO_LEAK_WARNING = "ignore:resource_tracker:UserWarning"
"""Option of the interpreter of the resource tracker, which removes what a killed process has left."""
SERVER_OF = "GPUTRAIN_FORK_SERVER_OF"
"""Environment variable with the pid of the server's node agent; ``trainer.agent.preload_first`` reads it."""

TRACKER_EXIT_S = 1.0
"""Time-out of the resource tracker's end: it outlives this process's end of its pipe as long as another process, which
no kill has reached, holds that too."""

_server: Any = forkserver._forkserver
_tracker: Any = resource_tracker._resource_tracker
_socket: int | None = None
"""Descriptor of the server's socket, through which this process connects."""


def start(preloaded: Sequence[str]) -> BaseContext:
    """Start the fork server, which imports the modules, and return the context that starts processes from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    # Ctrl-C goes to the whole foreground group, and Slurm may signal every process of a job. The server inherits the
    # mask; in this process such signals stay pending until the mask is restored.
    with signals_blocked(SAVE_SIGNALS):
        sys.warnoptions.append(NO_LEAK_WARNING)  # beside a rank's one line about its end, such as without a compiler
        resource_tracker.ensure_running()  # it ignores SIGINT and SIGTERM itself, and unblocks them in this process
        sys.warnoptions.remove(NO_LEAK_WARNING)
        signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)
        with environment({SERVER_OF: str(os.getpid())} | FORK_SAFE):
            _ensure_running()
    return context


def _ensure_running() -> None:
    """Start the server and delete its socket's name: this process connects through a descriptor.

    The folder of the socket, which a kill could leave behind, exists only for the milliseconds of the start.
    """
    global _socket
    within = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="gputrain-", dir=within) as folder, sockets_in(folder):
        forkserver.ensure_running()
        _socket = os.open(_server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
        _server._forkserver_address = f"/proc/self/fd/{_socket}"


def ended(timeout_s: float) -> tuple[bool, int | None]:
    """Return whether the server has ended, and the signal that killed it; False if none was started.

    Args:
        timeout_s: time to wait for its end: its connections close a moment before.
    """
    pid = _server._forkserver_pid
    if pid is None:
        return False, None
    try:
        if not _wait(pid, timeout_s):
            return False, None
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except (ChildProcessError, ProcessLookupError):
        return True, None  # it has been waited for already
    assert result is not None
    return True, result.si_status if result.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else None


def stop() -> None:
    """End the server and its resource tracker; call it after all processes forked from the server have ended."""
    # The standard library ends both at the exit of this process, too late for its report that no process is left, and
    # waits without limit for the tracker.
    global _socket
    if _server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_server._forkserver_pid, signal.SIGKILL)
        _server._forkserver_address = "\0"  # an abstract address, of which ``_stop`` deletes no file
        _server._stop()
    if _socket is not None:
        os.close(_socket)
        _socket = None
    if _tracker._pid is not None:
        os.close(_tracker._fd)
        if not _wait(_tracker._pid, TRACKER_EXIT_S):
            os.kill(_tracker._pid, signal.SIGKILL)
        os.waitpid(_tracker._pid, 0)
        _tracker._fd = _tracker._pid = None


def _wait(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a child, which is not reaped; return False after a time-out."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def own_pids() -> set[int]:
    """Return the pids of the server and the resource tracker, children of this process whose ends it follows."""
    return {pid for pid in (_server._forkserver_pid, tracker_pid()) if pid is not None}


def tracker_pid() -> int | None:
    """Return the pid of the resource tracker, which frees shared memory of killed ranks and then ends by itself."""
    pid: int | None = _tracker._pid
    return pid


@contextlib.contextmanager
def sockets_in(folder: str) -> Iterator[None]:
    """Have ``multiprocessing`` make its sockets in a folder while the body runs."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    settings["tempdir"] = folder
    try:
        yield
    finally:
        settings["tempdir"] = before


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started in the body."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        set_variables(before)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set environment variables of this process; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
