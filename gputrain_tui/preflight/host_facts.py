"""Facts of a run's hosts and of the connections between them, as plain values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gputrain_tui.hosts.environment_facts import Environment
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from trainer.host.resource_limits import ResourceLimits


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a host for one node: the answer of ``facts`` in ``gputrain_tui.hosts.node_facts``; untrusted."""

    machine: str
    """Identity: differs between any two machines, and between containers with their own network."""
    inventory: Inventory
    limits: ResourceLimits
    shm_free_bytes: int | None = None
    folders: tuple[Folder, ...] = ()
    """Folders that ranks write into: temporary files, the record, and on the first node checkpoints."""
    port: Port | None = None
    """Port of the rendezvous; on the first node only."""
    rendezvous: RendezvousFile | None = None
    probe_port: int = 0
    addresses: tuple[str, ...] = ()
    environment: Environment | None = None
    problem: str = ""
    """Reason why there is no environment, in one line."""
    problem_key: str = ""
    """The recipe's key of that problem: ``workdir``, ``setup`` or ``python``."""


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the host of a node, or the reason why there are none, and its connections to the other hosts."""

    node: int
    """The first of the nodes with this host, folder, setup, interpreter and environment."""
    host: str
    is_local: bool = False
    """Whether the host is this machine."""
    facts: HostFacts | None = None
    problem: str = ""
    """Reason why there are no facts, in one line."""
    clock_offset_s: float = 0.0
    """Lead of its clock over this machine's; negative if it is behind."""
    round_trip_s: float = 0.0
    """Duration of the request for its clock; the error of ``clock_offset_s`` is at most half of it."""
    lost: bool = False
    """Whether it found no route to the first node."""
    interface: str = ""
    """Network interface of the route to the other hosts; empty if unknown."""
    token: bool | None = None
    """Whether the token beside the rendezvous file is visible on it; None if no token was written."""
    unreachable: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Address and reason for each node that it cannot reach, in one text."""
