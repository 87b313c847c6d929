"""Facts that the preflight checks need, as plain values: checks are tested without the machine."""

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
    """Why it cannot be written; empty when it can."""
    free_bytes: int | None = None
    """Free for ordinary users on its file system; None where that is not reported."""
    free_files: int | None = None
    """Free inodes of its file system; None where they are not reported."""
    checkpoints: int = 0
    """Number of checkpoints in it."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """The port on which rank 0 listens."""

    number: int
    state: Literal["free", "busy", "root"]
    """``root``: only the superuser may listen on it."""
    holder: str = ""
    """The process that listens on a busy one."""
    address: str = ""
    """Host that the ranks connect to."""
    ours: bool = True
    """Whether ``address`` is one of this machine."""


class RendezvousFile(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous file of a ``file://`` init method."""

    path: str
    problem: str = ""
    fix: str = ""


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The torch that the ranks of this machine import."""

    version: str = ""
    """Empty when torch is not installed."""
    cuda: str | None = None
    """CUDA version for which it was built; None for a build without."""
    hip: str | None = None
    """Likewise the ROCm version."""


class MissingInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of a recipe's key that cannot be used."""

    key: str
    what: str
    fix: str = ""


class PreflightFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine; None and empty mean not collected or not known."""

    data: MissingInput | None = None
    """The task's data, where it cannot be read."""
    data_checked: bool = False
    """Whether the data was looked for: that of a user's own task is read by its ranks only."""
    script: MissingInput | None = None
    resume: MissingInput | None = None
    port: Port | None = None
    rendezvous: RendezvousFile | None = None
    home: Folder | None = None
    """Folder of the run directories."""
    save_dir: Folder | None = None
    shm_free_bytes: int | None = None
    """Free in ``/dev/shm``."""
    limits: ResourceLimits | None = None
    """Limits of processes and memory."""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cores: int | None = None
    """CPU cores that this process may use."""
    open_files: int | None = None
    """Soft limit of open files per process; None for unlimited."""
    torch: Torch | None = None
    """Read only when ranks use GPUs."""
    inventories: Mapping[str, Inventory] = msgspec.field(default_factory=dict)
    """By host as in the recipe, ``localhost`` for this machine."""
