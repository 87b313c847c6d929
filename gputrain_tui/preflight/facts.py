"""The preflight's facts of a machine: plain values, so that checking them needs no machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from trainer.host.resource_limits import ResourceLimits

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that a run writes into."""

    path: str
    problem: str = ""
    """Why nothing can be written there; empty when something can."""
    free_bytes: int | None = None
    """Room that an ordinary user has on its file system; None when it does not say."""
    free_files: int | None = None
    """How many more files its file system takes; None when it does not say."""
    checkpoints: int = 0
    """How many checkpoints lie in it."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """The port on which rank 0 listens."""

    number: int
    state: Literal["free", "busy", "root"]
    """``root``: only the superuser may listen on it."""
    holder: str = ""
    """Who listens on a busy one."""
    address: str = ""
    """What the ranks connect to."""
    ours: bool = True
    """Whether that is an address of this machine."""


class RendezvousFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file at which the ranks meet."""

    path: str
    problem: str = ""
    fix: str = ""


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The torch that the ranks of this machine import."""

    version: str = ""
    """Empty when there is none."""
    cuda: str | None = None
    """CUDA version for which it was built; None for a build without."""
    hip: str | None = None
    """The same of ROCm."""


class MissingInput(msgspec.Struct, frozen=True, kw_only=True):
    """A key that names something which is not there, and what to say about it."""

    key: str
    what: str
    fix: str = ""


class PreflightFacts(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, as far as a recipe concerns it; None and empty mean: not looked at, or it does not say."""

    data: MissingInput | None = None
    """Why the task's data cannot be read."""
    data_seen: bool = False
    """Whether the data was looked for: a user's own task is asked by its ranks."""
    script: MissingInput | None = None
    resume: MissingInput | None = None
    port: Port | None = None
    rendezvous: RendezvousFile | None = None
    home: Folder | None = None
    """Where runs are recorded."""
    save_dir: Folder | None = None
    shm_free_bytes: int | None = None
    """Room in ``/dev/shm``."""
    limits: ResourceLimits | None = None
    """How many ranks the kernel's limits allow."""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cores: int | None = None
    """That this process may use."""
    open_files: int | None = None
    """How many files a process may have open; None for any number."""
    torch: Torch | None = None
    """Looked at only where ranks use GPUs."""
    inventories: Mapping[str, Inventory] = msgspec.field(default_factory=dict)
    """Of machines that were asked, by host as the recipe names it, ``localhost`` for this one."""
