"""Collects the facts of this machine that a plan depends on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable

from gputrain_tui.hosts.host_names import LocalFacts, address_of
from gputrain_tui.hosts.slurm_commands import allocation
from trainer.host.addresses import is_loopback, own_addresses
from trainer.host.ports import free_port


def local_facts(hosts: Iterable[str | None]) -> LocalFacts:
    """Return the facts of this machine for a plan with these hosts; addresses only if one of them is not loopback."""
    names_hosts = any(host is not None and not is_loopback(address_of(host)) for host in hosts)
    addresses = own_addresses() if names_hosts else ()
    name = socket.gethostname().lower()
    return LocalFacts(
        names=frozenset({name, name.split(".")[0], *addresses}),
        addresses=tuple(address for address in addresses if not is_loopback(address)),
        free_port=free_port(),
        python=sys.executable,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        slurm="SLURM_JOB_ID" in os.environ,
        slurm_hosts=tuple(host for host, _ in allocation()),
    )
