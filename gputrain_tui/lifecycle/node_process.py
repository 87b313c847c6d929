"""Interface of a node's process, as the supervisor holds it; each launcher has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity


class NodeProcess(ABC):
    """Process of one node, as held by the supervisor."""

    host_error = ""
    """Error of its host or of the connection, which did not start or keep it; empty if its log has the cause."""

    problem = ""
    """Why the connection to its host was opened again last, in one line."""

    unwritable = ""
    """Why the run directory of its host cannot be written, where its ranks cannot tell it; empty if it can."""

    def __init__(self, node: int, host: str, identity: ProcessIdentity | None) -> None:
        self.node = node
        """Index of the node in the plan."""
        self.host = host
        self.identity = identity
        """Node agent, or the host agent above it on another host; None until that host has answered."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the process ends, or its identity becomes known."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""

    @abstractmethod
    def stop(self, level: StopLevel) -> None:
        """Send the node agent a stop request, without waiting."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process; its ranks end with it."""

    @abstractmethod
    def close(self) -> None:
        """Close the file descriptors of a process that has ended."""

    def silent_s(self) -> float:
        """Return the seconds since the last message of its host; 0 for this machine."""
        return 0.0

    def lost_s(self) -> float:
        """Return the seconds since the last sign of its host: also that a disk keeps it from answering."""
        return self.silent_s()

    def count_silence_anew(self) -> None:  # noqa: B027 - this machine is never silent
        """Count the silence of its host from now on, as after a time in which this process could hear nothing."""
