"""What hosts say of themselves and of each other, as plain values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gputrain_tui.hosts.environment_facts import Environment
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from trainer.host.resource_limits import ResourceLimits


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of one node: the answer of ``gputrain_tui.hosts.node_facts``, as other machines give it."""

    name: str
    """As the host calls itself."""
    machine: str
    """Differs between any two machines, and between containers with a network of their own."""
    inventory: Inventory
    limits: ResourceLimits
    shm_free_bytes: int | None = None
    folders: tuple[Folder, ...] = ()
    """Where ranks write: temporary files, the record, and on the first node checkpoints."""
    port: Port | None = None
    """Of the rendezvous; on the first node only."""
    rendezvous: RendezvousFile | None = None
    probe_port: int = 0
    addresses: tuple[str, ...] = ()
    environment: Environment | None = None
    problem: str = ""
    """Why there is no environment, in one line."""
    problem_key: str = ""
    """The recipe's key for that: ``workdir``, ``setup`` or ``python``."""


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the host of a node, and what it says of the others."""

    node: int
    """The first node of its kind on the host."""
    host: str
    here: bool = False
    """Whether it is this machine."""
    facts: HostFacts | None = None
    problem: str = ""
    """Why there are none, in one line."""
    clock_offset_s: float = 0.0
    """How far its clock is ahead of this machine's."""
    round_trip_s: float = 0.0
    """Of the question for its clock: the offset is known to half of it."""
    lost: bool = False
    """Whether there is no way from it to the first node."""
    interface: str = ""
    """Network interface on the way to the other hosts; empty where that is not known."""
    token: bool | None = None
    """Whether it sees the token beside the rendezvous file; None where there is none."""
    unreachable: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Address and reason of the nodes that it cannot reach."""
