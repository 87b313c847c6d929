"""Connections that a preflight opens and the supervisor of the run inherits."""

from __future__ import annotations

from typing import Protocol

import msgspec

CONNECTIONS = "--connections="
"""Flag of the supervisor: its inherited connections by node, as JSON."""


class OpenConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A connection to the program ``node_facts`` on a host, in the form that one process passes to another."""

    mark: str
    """Mark at the beginning of each line of its answers."""
    descriptors: tuple[int, int, int, int]
    """``HostPipes.descriptors``."""


class TransferableConnection(Protocol):
    """A connection of this process that another one can inherit."""

    @property
    def open_connection(self) -> OpenConnection:
        """Mark and descriptors, for the process that inherits the connection."""

    def detach(self) -> None:
        """Close the descriptors in this process only."""

    def close(self) -> None:
        """End the connection."""


class OpenConnections:
    """The connections by node, closed on exit unless a supervisor has inherited them."""

    def __init__(self) -> None:
        self._dialogs: dict[int, TransferableConnection] = {}

    def __enter__(self) -> OpenConnections:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections that no supervisor has inherited."""
        for dialog in self._dialogs.values():
            dialog.close()
        self._dialogs.clear()

    def add(self, node: int, dialog: TransferableConnection) -> None:
        """Keep the connection of a node open."""
        self._dialogs[node] = dialog

    @property
    def by_node(self) -> dict[int, OpenConnection]:
        """Mark and descriptors of each node's connection, for the supervisor."""
        return {node: dialog.open_connection for node, dialog in self._dialogs.items()}

    def hand_over(self) -> None:
        """Close the descriptors in this process after the supervisor has inherited them."""
        for dialog in self._dialogs.values():
            dialog.detach()
        self._dialogs.clear()
