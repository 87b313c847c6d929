"""``python -m trainer.warm_agent``: load torch ahead, then wait for a run on standard input and become its node agent.

The supervisor of the warm pool starts it. At the end of standard input it exits without a run.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from types import FrameType

import msgspec

from trainer import __main__ as trainer
from trainer.agent import forkserver
from trainer.contract.warm_pool import READY, WarmRequest
from trainer.host import process_guard
from trainer.host.proc_environ import show_run_in_proc
from trainer.host.stop_request import LEASE

IMPORTED_AHEAD = (
    "trainer.agent.launch",
    "trainer.environments.dispatch",
    "trainer.host.visible_devices",
    "trainer.tasks.registry",
)
"""Modules of the node agent, imported while the fork server loads torch."""


def main() -> int:
    """Load torch, wait for a run, and return the exit code of its node agent."""
    ready_fd = os.dup(1)
    _redirect(os.devnull, os.O_WRONLY, 1, 2)
    with _end_with_parent():
        context = forkserver.start([*forkserver.PRELOADED, "trainer.engine.preload"])
        for module in IMPORTED_AHEAD:
            importlib.import_module(module)
        _wait_for_preload(context)
        with suppress(BrokenPipeError):
            os.write(ready_fd, READY)
        os.close(ready_fd)
        line = _read_line()
        if not line:
            return 0
    return _run_request(msgspec.json.decode(line, type=WarmRequest))


def _run_request(request: WarmRequest) -> int:
    """Run the node agent of a request, with the request's environment and log."""
    os.environ.clear()
    os.environ.update(request.environment)
    show_run_in_proc()
    _redirect(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1, 2)
    if os.environ.get(LEASE) != "stdin":
        _redirect(os.devnull, os.O_RDONLY, 0)
    sys.argv[1:] = request.words
    return trainer.main(request.words)


@contextmanager
def _end_with_parent() -> Iterator[None]:
    """End this process, and its fork server, if its parent ends within the block."""
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    process_guard.signal_on_parent_death(signal.SIGTERM)
    completed = False
    try:
        yield
        completed = True
    finally:
        process_guard.signal_on_parent_death(0)
        signal.signal(signal.SIGTERM, before)
        if not completed:
            forkserver.stop()


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _wait_for_preload(context: BaseContext) -> None:
    """Wait until the fork server has loaded its modules, by forking a process that exits at once."""
    process = context.Process(target=_exit_at_once)  # type: ignore[attr-defined]
    process.start()
    process.join()


def _exit_at_once() -> None:
    """Do nothing."""


def _read_line() -> bytes:
    """Read one line and nothing after it: the rest of standard input belongs to the run."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            return b""
        line += part
    return line


def _redirect(path: str, flags: int, *descriptors: int) -> None:
    opened = os.open(path, flags, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)


if __name__ == "__main__":
    sys.exit(main())
