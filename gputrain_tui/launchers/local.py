"""Starts a node's command as a process of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer.record import RunDir

if TYPE_CHECKING:
    from gputrain_tui.plan import PlannedNode


class LocalProcess:
    """A node's parent process that this process started."""

    def __init__(self, node: int, host: str, process: subprocess.Popen[bytes]) -> None:
        self.node = node
        self.host = host
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """Exit code, a signal's number negated, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to end: SIGTERM, and the end of its lease."""
        self._process.send_signal(signal.SIGTERM)
        self._end_lease()

    def kill(self) -> None:
        """Kill it and whatever shares its session's process group."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._end_lease()

    def close(self) -> None:
        """Let go of the descriptors."""
        self._end_lease()
        os.close(self._pidfd)

    def _end_lease(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class LocalLauncher:
    """This machine."""

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> LocalProcess:
        """Start a node's command in a session of its own, so that no terminal's signal reaches it.

        Raises:
            OSError: the command cannot be started.
        """
        environment = {**os.environ, **env, **node.env}
        environment.pop("GPUTRAIN_LEASE", None)
        if leased:
            environment["GPUTRAIN_LEASE"] = "stdin"
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        with run_dir.node_log(node.node).open("ab") as log:
            process = subprocess.Popen(
                node.argv,
                env=environment,
                stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalProcess(node.node, node.host, process)
