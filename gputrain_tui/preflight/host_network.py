"""Tries the connections between the hosts of a run over ssh, as the preflight does, without their other facts.

Each host listens on a free port, and all connect to all others at the addresses of the interface that the run uses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from gputrain_tui.hosts.host_channel import HostChannel, HostError
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.collect_hosts import REACH_TIMEOUT_S, UNREACHABLE, require_addresses
from trainer.contract.backends import is_nccl

LISTEN_TIMEOUT_S = 6.0
"""Time limit until a host listens, connecting included: ssh itself gives up after five seconds."""
TRIES = 3
"""Connections to each address; one that is made counts: on a line that loses a fifth of all packets three fail once in
ten thousand times."""


class _Listener(msgspec.Struct):
    port: int
    addresses: dict[str, str]
    """Interface of each address at which others may reach the host, the likeliest first."""


LISTENER = msgspec.json.Decoder(_Listener)
"""Made before any thread: msgspec crashes if several threads decode a type for the first time."""


def probe_network(plan: Plan, local: LocalFacts) -> dict[tuple[str, str], bool]:
    """Return for each host of a plan and each other one whether it can connect to it; unknown pairs are absent.

    Unknown are those of a host that does not answer, and of one without an address.
    """
    nodes = {"" if is_local(node.host, local) else node.host: node for node in reversed(plan.nodes)}
    hosts = {node.host: node for node in reversed(nodes.values())}
    if len(hosts) < 2:
        return {}
    ssh = Ssh()
    channels: dict[str, HostChannel] = {}
    listeners: dict[str, _Listener] = {}
    reach: dict[tuple[str, str], bool] = {}

    def listen(host: str) -> None:
        channel = channels[host] = ssh.channel(host, here=is_local(host, local))
        listener = channel.call("listen", LISTENER, LISTEN_TIMEOUT_S)
        require_addresses(list(listener.addresses), listener.port)
        listeners[host] = listener

    def connect(host: str) -> None:
        own = listeners[host].addresses
        tried = [
            (other, address, listener.port)
            for other, listener in listeners.items()
            for address in _addresses(hosts[other], plan.backend, listener)
            if other != host and address not in own  # such as the one of Docker's bridge, which leads back to the host
            for _ in range(TRIES)
        ]
        endpoints = {number: (address, port) for number, (_, address, port) in enumerate(tried)}
        failed = channels[host].call(
            "reach", UNREACHABLE, LISTEN_TIMEOUT_S + REACH_TIMEOUT_S, endpoints=endpoints, timeout_s=REACH_TIMEOUT_S
        )
        for number, (other, _, _) in enumerate(tried):
            reach[host, other] = reach.get((host, other), False) or number not in failed

    def release(host: str) -> None:
        channel = channels.pop(host)
        if is_local(host, local):
            channel.close()
        else:
            channel.send("release")
            ssh.keep(channel)

    for step in (listen, connect, release):

        def guarded(host: str) -> None:
            with suppress(HostError):
                step(host)  # noqa: B023 - all hosts have taken it before the next one

        ssh.on_all(guarded, hosts if step is listen else list(listeners))
    for channel in channels.values():
        channel.close(at_once=True)
    return {(host, other): reach[host, other] for host in hosts for other in hosts if (host, other) in reach}


def _addresses(node: PlannedNode, backend: str, listener: _Listener) -> list[str]:
    """Return the addresses of the interface that a node's ranks use; all of its host if it is not known."""
    name = "NCCL_SOCKET_IFNAME" if is_nccl(backend) else "GLOO_SOCKET_IFNAME"
    environ: Mapping[str, str] = {**os.environ, **node.env}
    names = environ.get(name, "").lstrip("=").split(",")
    return [address for address, interface in listener.addresses.items() if interface in names] or list(
        listener.addresses
    )
