"""A warm supervisor and a warm node agent may be killed at any time, and leave no process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from bench import until

from gputrain_tui.lifecycle.warm_pool import WarmPool


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of all that a test starts; its name is short, because sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="gt-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


def files(temporary: Path) -> list[Path]:
    """Return what is there besides torch's cache, which is meant to stay."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def has_fork_server(warm: WarmPool) -> bool:
    assert warm.pid is not None
    words = [process.cmdline() for process in psutil.Process(warm.pid).children(recursive=True)]
    return any("multiprocessing.forkserver" in " ".join(command) for command in words)


def loading(warm: WarmPool) -> None:
    until(lambda: has_fork_server(warm))


def ready(warm: WarmPool) -> None:
    assert warm.wait(120)


@pytest.mark.parametrize("moment", [loading, ready])
def test_a_pair_that_is_killed_leaves_no_process_and_no_file(
    temporary: Path, moment: Callable[[WarmPool], None]
) -> None:
    warm = WarmPool()
    try:
        warm.open()
        moment(warm)
        until(lambda: not files(temporary))  # the folder of a socket, while its server is started
        assert warm.pid is not None
        supervisor = psutil.Process(warm.pid)
        below = supervisor.children(recursive=True)
        (node,) = supervisor.children()
        for process in (supervisor, node):
            os.kill(process.pid, signal.SIGSTOP)  # so that neither hears of the other's end
        for process in (supervisor, node):
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(process.is_running() for process in below))
        assert files(temporary) == []
    finally:
        warm.close()
