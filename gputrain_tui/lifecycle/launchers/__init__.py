"""Launchers, which start the commands of nodes as processes: their protocol, and one module for each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from trainer.contract.errors import RequestError, nearest

if TYPE_CHECKING:
    from gputrain_tui.plan.planner import PlannedNode
    from trainer.contract.record import RunDir
    from trainer.contract.stop_level import StopLevel
    from trainer.host.process_identity import ProcessIdentity

LAUNCHERS: dict[str, tuple[str, str]] = {
    "local": ("gputrain_tui.lifecycle.launchers.local", "LocalLauncher"),
    "ssh": ("gputrain_tui.lifecycle.launchers.ssh", "SshLauncher"),
    "slurm": ("gputrain_tui.lifecycle.launchers.slurm", "SlurmLauncher"),
}
"""Module and class of each launcher, by name."""


class NodeProcess(Protocol):
    """Process of one node, as held by the supervisor."""

    node: int
    """Index of the node in the plan."""
    host: str
    host_error: str
    """Error of its host or of the connection, which did not start or keep it; empty if its log has the cause."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """Node agent, or the host agent above it on another host; None until that host has answered."""

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the process ends, or its identity becomes known."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""

    def stop(self, level: StopLevel) -> None:
        """Send the node agent a stop request, without waiting."""

    def kill(self) -> None:
        """Kill the process; its ranks end with it."""

    def close(self) -> None:
        """Close the file descriptors of a process that has ended."""

    def silent_s(self) -> float:
        """Return the seconds since the last message of its host; 0 for this machine."""


class Launcher(Protocol):
    """Launcher of the commands of nodes."""

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command.

        Args:
            node: node of the plan.
            run_dir: run directory, which gets the output.
            env: environment of the run, besides the node's own.
            leased: whether the node ends when this process does.

        Raises:
            OSError: the command cannot be started.
        """

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node of a killed supervisor; None if it has ended.

        Its exit code is read from the node's outcome, as the kernel reports it to the parent process only.

        Args:
            node: node of the plan.
            run_dir: run directory.
            identity: process of the node in ``attempt.json``; None if not recorded.
            leased: whether the node ends when this process does.
        """


def launcher(name: str) -> Launcher:
    """Return the launcher of a plan by its name.

    Raises:
        RequestError: there is no such launcher.
    """
    if name not in LAUNCHERS:
        raise RequestError(
            f"launcher {name!r} is not known; allowed are {', '.join(LAUNCHERS)}{nearest(name, LAUNCHERS)}"
        )
    module, attribute = LAUNCHERS[name]
    return cast(Launcher, getattr(importlib.import_module(module), attribute)())
