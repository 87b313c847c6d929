"""Connections that a preflight opens and the supervisor of the run inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gputrain_tui.hosts.host_channel import HostChannel

CONNECTIONS = "--connections="
"""Flag of the supervisor: its inherited connections by node, as JSON."""


class OpenConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A connection to the program on a host, in the form that one process passes to another."""

    mark: str
    """Mark at the beginning of each of its frames."""
    descriptors: tuple[int, int, int, int]
    """Of the channel's pipes."""


class OpenConnections:
    """The connections by node, closed on exit unless a supervisor has inherited them."""

    def __init__(self) -> None:
        self._channels: dict[int, HostChannel] = {}

    def __enter__(self) -> OpenConnections:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections that no supervisor has inherited."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def add(self, node: int, channel: HostChannel) -> None:
        """Keep the connection of a node open."""
        self._channels[node] = channel

    @property
    def by_node(self) -> dict[int, OpenConnection]:
        """Mark and descriptors of each node's connection, for the supervisor."""
        return {
            node: OpenConnection(mark=channel.mark, descriptors=channel.pipes.descriptors)
            for node, channel in self._channels.items()
        }

    def hand_over(self) -> None:
        """Close the descriptors in this process after the supervisor has inherited them."""
        for channel in self._channels.values():
            channel.pipes.detach()
        self._channels.clear()
