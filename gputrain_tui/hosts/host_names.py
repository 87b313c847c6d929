"""Pure: which host names and addresses mean the machine that reads the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.host.addresses import is_loopback

THIS_MACHINE = "localhost"
"""How plans and inventories name the machine that reads the recipe."""
DEFAULT_PORT = 29600
"""Where the ranks of several nodes meet unless the recipe says otherwise: below the ports that Linux hands out, and
neither torchrun's 29400 nor torch's 29500, which other programs use."""


@dataclass(frozen=True, kw_only=True)
class LocalFacts:
    """What the plan needs to know of the machine that reads the recipe."""

    names: frozenset[str] = frozenset()
    """Its host names and addresses, in lower case."""
    addresses: tuple[str, ...] = ()
    """Addresses under which other machines may reach it, the likeliest first."""
    free_port: int = DEFAULT_PORT
    """A port that was just free for listening."""
    python: str = "python"
    """The interpreter that runs the trainer here; other machines run ``python``."""
    cuda_visible_devices: str | None = None
    """The environment's CUDA_VISIBLE_DEVICES."""
    slurm: bool = False
    """Whether this process is inside a Slurm allocation."""


def address_of(host: str) -> str:
    """Return what of ``user@host``, ``[address]`` or ``ssh://user@host:port`` other nodes connect to."""
    if host.startswith("ssh://"):
        host = re.sub(r":\d+$", "", host.removeprefix("ssh://"))
    return host.rpartition("@")[2].strip("[]")


def is_local(host: str | None, local: LocalFacts) -> bool:
    """Whether a node of a recipe is this machine."""
    if host is None or is_loopback(address_of(host)):
        return True
    name = address_of(host).lower()
    return name in local.names or (not _is_address(name) and name.split(".")[0] in local.names)


def _is_address(name: str) -> bool:
    return ":" in name or re.fullmatch(r"[\d.]+", name) is not None
