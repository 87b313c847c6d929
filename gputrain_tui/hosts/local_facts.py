"""Collects the facts of this machine that a plan depends on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable

from gputrain_tui.hosts.host_names import LocalFacts, address_of, is_address
from gputrain_tui.hosts.slurm_commands import allocation
from trainer.host.addresses import OUTSIDE, is_loopback, own_addresses, source_towards
from trainer.host.ports import free_port


def local_facts(hosts: Iterable[str | None]) -> LocalFacts:
    """Return the facts of this machine for a plan with these hosts; addresses only if one of them is not loopback.

    The address is that of the route to the first other host that is given by its own, else of the default route: names
    are not looked up, as a nameserver may not answer. Without such a route it is the only one there is.
    """
    others = [address_of(host) for host in hosts if host is not None and not is_loopback(address_of(host))]
    addresses = own_addresses() if others else ()
    towards = next((other for other in others if is_address(other) and other not in addresses), OUTSIDE)
    only = [each for each in addresses if not is_loopback(each) and ":" not in each]
    address = (source_towards(towards) if others else None) or (only[0] if len(only) == 1 else "")
    name = socket.gethostname().lower()
    return LocalFacts(
        names=frozenset({name, name.split(".")[0], *addresses}),
        address=address,
        free_port=free_port(),
        python=sys.executable,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        slurm="SLURM_JOB_ID" in os.environ,
        slurm_hosts=tuple(host for host, _ in allocation()),
    )
