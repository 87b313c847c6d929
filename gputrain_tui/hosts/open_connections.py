"""Hands connections that a preflight has opened to the supervisor of the run, which goes on with them."""

from __future__ import annotations

from typing import Protocol

import msgspec

CONNECTIONS = "--connections="
"""Flag of the supervisor: the connections that it inherits, JSON, by node."""


class OpenConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A connection to the program ``node_facts`` on a host, as one process hands it to another."""

    mark: str
    """Word before each line of its answers."""
    descriptors: tuple[int, int, int, int]
    """Of ``HostPipes``."""


class HandedOver(Protocol):
    """A connection of this process, between two questions."""

    @property
    def open_connection(self) -> OpenConnection:
        """What another process needs to go on with it."""

    def leave(self) -> None:
        """Close the descriptors of this process."""

    def close(self) -> None:
        """End the connection."""


class OpenConnections:
    """Connections to hosts that a preflight leaves open for the launch that follows it."""

    def __init__(self) -> None:
        self._dialogs: dict[int, HandedOver] = {}

    def __enter__(self) -> OpenConnections:
        """Close on exit what nobody has taken."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what nobody has taken."""
        for dialog in self._dialogs.values():
            dialog.close()
        self._dialogs.clear()

    def add(self, node: int, dialog: HandedOver) -> None:
        """Leave the connection of a node open."""
        self._dialogs[node] = dialog

    @property
    def by_node(self) -> dict[int, OpenConnection]:
        """What the launching process needs to go on with them."""
        return {node: dialog.open_connection for node, dialog in self._dialogs.items()}

    def hand_over(self) -> None:
        """Close them here, once the launching process has them."""
        for dialog in self._dialogs.values():
            dialog.leave()
        self._dialogs.clear()
