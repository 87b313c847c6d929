"""Starts the commands of nodes as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from gputrain_tui.hosts.host_agent import node_command
from gputrain_tui.lifecycle.launchers import Launcher
from gputrain_tui.lifecycle.leftovers import open_process
from gputrain_tui.lifecycle.node_process import NodeProcess
from trainer.contract.errors import ExitCode
from trainer.contract.home_folder import expand_home
from trainer.contract.outcome import node_outcome
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.stop_level import StopLevel
from trainer.host import import_path
from trainer.host.process_identity import ProcessIdentity, identify, is_alive
from trainer.host.stop_request import LEASE, signal_of

if TYPE_CHECKING:
    from gputrain_tui.plan.planner import PlannedNode


class LocalProcess(NodeProcess):
    """Node agent on this machine, started by this process or by a killed supervisor."""

    identity: ProcessIdentity

    def __init__(self, node: int, host: str, identity: ProcessIdentity, pidfd: int, run_dir: RunDir) -> None:
        super().__init__(node, host, identity)
        self._pidfd = pidfd
        self._run_dir = run_dir

    def fileno(self) -> int:
        return self._pidfd

    def poll(self) -> int | None:
        """Return the exit code in the node's outcome, 1 without an outcome; None while the process runs."""
        if is_alive(self.identity):
            return None
        result = node_outcome(self._run_dir, self.node)
        return ExitCode.FAILED if result is None else result.exit_code

    def wake(self) -> None:
        """Continue a process that was stopped by SIGSTOP: it runs no handler and does not end."""
        self._signal(signal.SIGCONT)

    def stop(self, level: StopLevel) -> None:
        self._signal(signal_of(level))
        self.wake()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class ChildProcess(LocalProcess):
    """Node agent that this process started; the end of its standard input, a pipe, ends its lease."""

    def __init__(self, node: PlannedNode, process: subprocess.Popen[bytes], run_dir: RunDir) -> None:
        super().__init__(node.node, node.host, identify(process.pid), os.pidfd_open(process.pid), run_dir)
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, level: StopLevel) -> None:
        super().stop(level)
        if level > StopLevel.SAVE:
            self._end_lease()

    def kill(self) -> None:
        """Kill the process group of the node agent."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._end_lease()

    def close(self) -> None:
        self._end_lease()
        super().close()

    def _end_lease(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


def node_environment(node: PlannedNode, env: Mapping[str, str], *, leased: bool) -> dict[str, str]:
    """Return the environment of a node agent: this process's, the run's and the node's own."""
    workdir = str(expand_home(node.workdir)) if node.workdir else ""
    added = {**env, **node.env, LEASE: "stdin" if leased else ""}
    return import_path.node_environment(os.environ, added, workdir)


class LocalLauncher(Launcher):
    """Launcher of nodes as processes of this machine."""

    adopted_as: type[LocalProcess] = LocalProcess

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> LocalProcess | None:
        pidfd = None if identity is None else open_process(identity.pid, run_dir.path)
        if identity is None or pidfd is None:
            return None
        if not is_alive(identity):  # checked after opening, so that the pidfd refers to the checked process
            os.close(pidfd)
            return None
        adopted = self.adopted_as(node.node, node.host, identity, pidfd, run_dir)
        adopted.wake()
        return adopted

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> ChildProcess:
        """Start a node's command in a session of its own, so that no signal of a terminal reaches it."""
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(run_dir.node_log(node.node)), "ab") as log:
            process = subprocess.Popen(
                node_command([str(expand_home(node.argv[0])), *node.argv[1:]], node.setup),
                cwd=expand_home(node.workdir) if node.workdir else None,
                env=node_environment(node, env, leased=leased),
                stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return ChildProcess(node, process, run_dir)
