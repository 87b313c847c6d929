"""How a node's command becomes a process: one small protocol, one module per launcher."""

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
"""Name to module and class."""


class NodeProcess(Protocol):
    """The process of one node as the supervisor holds it."""

    node: int
    """Index of the node in the plan."""
    host: str
    host_error: str
    """Why its host did not start or keep it, in one line; empty where its own log has the last word."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """The node agent, or the process that keeps it on another host; None until that host has answered."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended, or its identity is known."""

    def poll(self) -> int | None:
        """Exit code, a signal's number negated, or None while it runs."""

    def stop(self, level: StopLevel) -> None:
        """Ask the node agent to end its ranks and leave; returns immediately."""

    def kill(self) -> None:
        """End it without asking; its ranks die with it."""

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""

    def silent_s(self) -> float:
        """Return for how many seconds nothing has been heard of its host; 0 for this machine."""


class Launcher(Protocol):
    """Starts the command of a node."""

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command.

        Args:
            node: what to start, and where.
            run_dir: where its output goes.
            env: environment of the run, besides the node's own.
            leased: the node ends itself when this process is gone.

        Raises:
            OSError: the command cannot be started.
        """

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node that a killed supervisor started; None when it is gone.

        The identity is what that supervisor has written down of it, None for nothing.

        Its exit code is read from the node's outcome: the kernel gives it only to the parent process.
        """


def launcher(name: str) -> Launcher:
    """Return the launcher of a plan.

    Raises:
        RequestError: this installation has no such launcher.
    """
    if name not in LAUNCHERS:
        raise RequestError(
            f"launcher {name!r} is not known; it is one of {', '.join(LAUNCHERS)}{nearest(name, LAUNCHERS)}"
        )
    module, attribute = LAUNCHERS[name]
    return cast(Launcher, getattr(importlib.import_module(module), attribute)())
