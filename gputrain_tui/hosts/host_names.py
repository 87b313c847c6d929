"""Pure: recognises host names and addresses of this machine, the one that reads the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.host.addresses import is_loopback

THIS_MACHINE = "localhost"
"""Name in plans and inventories of the machine that reads the recipe."""
DEFAULT_PORT = 29600
"""Port of the rendezvous in commands for several nodes that are typed by hand, unless the recipe gives one: below the
ports that Linux hands out, and neither torchrun's 29400 nor torch's 29500, which other programs use."""

PENDING_HOST = "node-{}.slurm.invalid"
"""Name of a node that Slurm has not chosen yet; no host has such a name (RFC 2606)."""

CHANNELS = "--channels="
"""Flag of a supervisor, its last one: the open channels to hosts that it inherits, as JSON."""


@dataclass(frozen=True, kw_only=True)
class LocalFacts:
    """Facts about this machine that a plan depends on."""

    names: frozenset[str] = frozenset()
    """Its host names and addresses, in lower case."""
    address: str = ""
    """Address from which it reaches the other hosts, so that they may reach it there; empty without a route."""
    free_port: int = DEFAULT_PORT
    """A port of this machine that was free when the facts were read."""
    python: str = "python"
    """Interpreter that runs the trainer, on other machines too unless the recipe names theirs."""
    cuda_visible_devices: str | None = None
    """The environment's CUDA_VISIBLE_DEVICES; None if it is not set."""
    slurm: bool = False
    """Whether this process is inside a Slurm allocation."""
    slurm_hosts: tuple[str, ...] = ()


def address_of(host: str) -> str:
    """Return the host or address in ``user@host``, ``[address]`` or ``ssh://user@host:port``."""
    if host.startswith("ssh://"):
        host = re.sub(r":\d+$", "", host.removeprefix("ssh://"))
    return host.rpartition("@")[2].strip("[]")


def is_local(host: str | None, local: LocalFacts) -> bool:
    """Whether a node of a recipe is this machine."""
    if host is None or is_loopback(address_of(host)):
        return True
    name = address_of(host).lower()
    return name in local.names or (not is_address(name) and name.split(".")[0] in local.names)


def is_pending(host: str) -> bool:
    """Whether a host is a placeholder for one that Slurm has not chosen yet."""
    return host.endswith(PENDING_HOST.partition("{}")[2])


def is_address(name: str) -> bool:
    """Whether a host is given by an IPv4 or IPv6 address."""
    return ":" in name or re.fullmatch(r"[\d.]+", name) is not None
