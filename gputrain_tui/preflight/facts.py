"""Facts that the preflight checks read, as plain values: tests of the checks need no machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.environment_facts import Torch
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from gputrain_tui.preflight.result import CheckResult
from trainer.host.resource_limits import ResourceLimits

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory


START_CHECKS = {"resume": "resume", "eval_only": "checkpoint", "finetune_from": "weights"}
"""Check of the checkpoint or the weights from which a run starts, by the option that names them."""
START_FIXES = {
    "resume": "name a checkpoint or a folder of them",
    "eval_only": "name a checkpoint or a folder of them",
    "finetune_from": "name a file of weights, or a folder of DCP",
}
SHARES_FIX = "name the folder of such a run"


class PreflightFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine; None and empty mean not collected or not known."""

    data: CheckResult | None = None
    """The task's data, if it cannot be read."""
    data_checked: bool = False
    """Whether the data was checked: only the ranks of a user's own task can read its data."""
    optimizer: CheckResult | None = None
    """The package of the optimizer, if it is not installed."""
    script: CheckResult | None = None
    hiding: Sequence[str] = ()
    """Files beside the script that ``hiding_files`` returns."""
    report: CheckResult | None = None
    """The package of a live sink, if it is not installed."""
    resume: CheckResult | None = None
    """The checkpoint or the weights from which the run starts, if they cannot be read."""
    shares: CheckResult | None = None
    """The run whose recorded shares are to be repeated, if they cannot be."""
    port: Port | None = None
    rendezvous: RendezvousFile | None = None
    home: Folder | None = None
    """Folder of the run directories."""
    save_dir: Folder | None = None
    shm_free_bytes: int | None = None
    limits: ResourceLimits | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cores: int | None = None
    """CPU cores that this process may use."""
    cores_limit: str = ""
    """Limit by which these are not all of the machine, in a few words; empty without one."""
    open_files: int | None = None
    """Soft limit of open files per process; None for unlimited."""
    torch: Torch | None = None
    """Read only when ranks use GPUs."""
    queried: frozenset[str] = frozenset()
    inventories: Mapping[str, Inventory] = msgspec.field(default_factory=dict)
    """By host as in the recipe, ``localhost`` for this machine."""
