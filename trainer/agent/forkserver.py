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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from trainer.host.stop_request import SAVE_SIGNALS

PRELOADED = ["trainer.agent.preload_first", "trainer.agent.preload_torch"]
"""Modules that the server imports before it forks."""
FORK_SAFE = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment in which importing torch starts no thread and does not initialise CUDA: neither survives a fork."""
SERVER_OF = "GPUTRAIN_FORK_SERVER_OF"
"""Environment variable with the pid of the server's node agent; ``trainer.agent.preload_first`` reads it."""

TRACKER_EXIT_S = 1.0
"""Time-out of the resource tracker's end: it outlives this process's end of its pipe as long as another process, which
no kill has reached, holds that too."""

_environment: dict[str, str] | None = None
"""Environment of this process at the start of the server, which inherited it."""
_socket: int | None = None
"""Descriptor of the server's socket, through which this process connects."""


def start(preloaded: Sequence[str] | None = None) -> BaseContext:
    """Start the fork server and return the context that starts processes from it.

    Args:
        preloaded: modules that the server imports; default: ``PRELOADED``, which include torch.
    """
    global _environment
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED if preloaded is None else preloaded))
    # Ctrl-C goes to the whole foreground group, and Slurm may signal every process of a job. The server inherits the
    # mask; in this process such signals stay pending until the mask is restored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)
    if _environment is None:
        _environment = dict(os.environ)
    try:
        resource_tracker.ensure_running()  # it ignores SIGINT and SIGTERM itself, and unblocks them in this process
        signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)
        with environment({SERVER_OF: str(os.getpid())} | FORK_SAFE):
            _ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def ended(timeout_s: float) -> tuple[bool, int | None]:
    """Return whether the server has ended, and the signal that killed it; False if none was started.

    Args:
        timeout_s: time to wait for its end: its connections close a moment before.
    """
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None:
        return False, None
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True, None  # it has been waited for already
        if found is not None:
            return True, found.si_status if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else None
        if time.monotonic() >= deadline:
            return False, None
        time.sleep(0.005)


def _ensure_running() -> None:
    """Start the server and delete its socket's name: this process connects through a descriptor.

    The folder of the socket, which a kill could leave behind, exists only for the milliseconds of the start.
    """
    global _socket
    server: Any = forkserver._forkserver
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="gputrain-", dir=before) as folder:
        settings["tempdir"] = folder
        try:
            forkserver.ensure_running()
        finally:
            settings["tempdir"] = before
        if Path(server._forkserver_address).parent == Path(folder):  # the server was not running before
            _close_socket()
            _socket = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            server._forkserver_address = f"/proc/self/fd/{_socket}"


def _close_socket() -> None:
    global _socket
    if _socket is not None:
        os.close(_socket)
    _socket = None


def environment_changes() -> dict[str, str | None]:
    """Return the variables that have changed since the server was started, for its processes to set; None removes."""
    if _environment is None:
        return {}
    removed: dict[str, str | None] = dict.fromkeys(_environment.keys() - os.environ.keys())
    return removed | {name: value for name, value in os.environ.items() if _environment.get(name) != value}


def stop() -> None:
    """End the server and its resource tracker; call it after all processes forked from the server have ended."""
    # The standard library ends both at the exit of this process, too late for its report that no process is left, and
    # waits without limit for the tracker.
    global _environment
    _environment = None
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        server._forkserver_address = "\0"  # an abstract address, of which ``_stop`` deletes no file
        server._stop()
        _close_socket()
    tracker: Any = resource_tracker._resource_tracker
    if tracker._pid is not None:
        os.close(tracker._fd)
        _end(tracker._pid, TRACKER_EXIT_S)
        tracker._fd = tracker._pid = None


def _end(pid: int, timeout_s: float) -> None:
    """Wait for a child that is about to end, and kill it after a time-out."""
    descriptor = os.pidfd_open(pid)
    if not select.select([descriptor], [], [], timeout_s)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(descriptor)
    os.waitpid(pid, 0)


def own_pids() -> set[int]:
    """Return the pids of the server and the resource tracker, children of this process whose ends it follows."""
    server: Any = forkserver._forkserver
    return {pid for pid in (server._forkserver_pid, tracker_pid()) if pid is not None}


def tracker_pid() -> int | None:
    """Return the pid of the resource tracker, which frees shared memory of killed ranks and then ends by itself."""
    tracker: Any = resource_tracker._resource_tracker
    pid: int | None = tracker._pid
    return pid


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started in the body."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
