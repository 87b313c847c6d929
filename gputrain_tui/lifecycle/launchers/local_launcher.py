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


class LocalProcess:
    """Node agent that this process started."""

    host_error = ""

    def __init__(self, node: int, host: str, process: subprocess.Popen[bytes]) -> None:
        self.node = node
        self.host = host
        self.pid = process.pid
        self.identity = identify(process.pid)
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        return self._pidfd

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, level: StopLevel) -> None:
        for number in (signal_of(level), signal.SIGCONT):  # a stopped process runs no handler
            self._process.send_signal(number)
        if level > StopLevel.SAVE:
            self._end_lease()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._end_lease()

    def close(self) -> None:
        self._end_lease()
        os.close(self._pidfd)

    def silent_s(self) -> float:
        return 0.0

    def _end_lease(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class AdoptedProcess:
    """Node agent that a killed supervisor started."""

    host_error = ""

    def __init__(self, node: int, host: str, identity: ProcessIdentity, pidfd: int, run_dir: RunDir) -> None:
        self.node = node
        self.host = host
        self.identity = identity
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
        """Continue a process that was stopped by SIGSTOP, as the supervisor waits for its end."""
        self._signal(signal.SIGCONT)

    def stop(self, level: StopLevel) -> None:
        self._signal(signal_of(level))
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)

    def silent_s(self) -> float:
        return 0.0

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


def node_environment(node: PlannedNode, env: Mapping[str, str], *, leased: bool) -> dict[str, str]:
    """Return the environment of a node agent: this process's, the run's and the node's own."""
    workdir = str(expand_home(node.workdir)) if node.workdir else ""
    added = {**env, **node.env, LEASE: "stdin" if leased else ""}
    return import_path.node_environment(os.environ, added, workdir)


class LocalLauncher(Launcher):
    """Launcher of nodes as processes of this machine."""

    adopted_as: type[AdoptedProcess] = AdoptedProcess

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> AdoptedProcess | None:
        pidfd = None if identity is None else open_process(identity.pid, run_dir.path)
        if identity is None or pidfd is None:
            return None
        if not is_alive(identity):  # checked after opening, so that the pidfd refers to the checked process
            os.close(pidfd)
            return None
        adopted = self.adopted_as(node.node, node.host, identity, pidfd, run_dir)
        adopted.wake()
        return adopted

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> LocalProcess:
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
        return LocalProcess(node.node, node.host, process)
