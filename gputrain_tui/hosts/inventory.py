"""Takes the inventory of a machine: GPUs and their processes, cores, memory, load, network addresses.

It also runs on hosts without gputrain: ``host_channel`` sends it there with the files of ``trainer.host`` that
it imports, and all of them need Python 3.10 and the standard library only. Hence frozen dataclasses, which msgspec
decodes as well. A missing driver, or a query that a GPU does not support, is no error; a value that could not be
measured is None, never 0.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.host.addresses import Network, networks
from trainer.host.boot import uptime_s
from trainer.host.cores import Cpus, load_average, read_cpus
from trainer.host.gpu_claims import claims
from trainer.host.memory import Memory, read_usable_memory
from trainer.host.nvml import Gpu as Gpu, GpuProcess as GpuProcess, ask_driver
from trainer.host.processes import owner_and_name

FREE_BELOW_BYTES = 500 << 20
"""Memory that the driver and a display may hold on an idle GPU."""
FREE_BELOW_SHARE = 0.05
"""The same as a share of a GPU's memory; the larger of both counts."""
FREE_BELOW_PERCENT = 10.0
"""A GPU with more utilisation runs a process of a container or a virtual machine that is invisible here."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """One machine at one moment."""

    host: str
    time: float
    """Unix seconds."""
    system: str = ""
    cpus: Cpus
    memory: Memory
    load: tuple[float, float, float] | None = None
    """Runnable processes on average over 1, 5 and 15 minutes."""
    uptime_s: float | None = None
    networks: tuple[Network, ...] = ()
    driver: str | None = None
    """Version of the NVIDIA driver; None without a driver."""
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    note: str = ""
    """One line about a missing driver or GPU, for people; empty if all answered."""


def take_inventory() -> Inventory:
    """Read the inventory of this machine."""
    driver, cuda, gpus, note = _gpus()
    return Inventory(
        host=socket.gethostname(),
        time=time.time(),
        system=f"{platform.system()} {platform.release()}",
        cpus=read_cpus(),
        memory=read_usable_memory(),
        load=load_average(),
        uptime_s=uptime_s(),
        networks=networks(),
        driver=driver,
        cuda=cuda,
        gpus=gpus,
        note=note,
    )


def inventory(_: object, __: object) -> dict[str, Any]:
    """Answer the call of ``host_program``: this machine's inventory."""
    return asdict(take_inventory())


def to_json(inventory: Inventory) -> str:
    """Return the inventory as one line of JSON."""
    return json.dumps(asdict(inventory), separators=(",", ":"), ensure_ascii=False)


def why_busy(gpu: Gpu) -> str:
    """Return the reason why a GPU is not free; empty if it is free.

    Free means: claimed by no run, no compute process, less memory in use than ``max(500 MiB, 5 %)``, and less than 10 %
    utilisation. A GPU that reports neither its processes nor its memory is not free.
    """
    if gpu.mig:
        return "split into MIG instances"
    if gpu.prohibited:
        return "its compute mode is prohibited"
    if gpu.claim is not None:
        return f"taken by {gpu.claim.text}"
    working = [process for process in gpu.processes or () if process.kind == "compute"]
    if working:
        users = sorted({process.user for process in working if process.user})
        return f"{len(working)} process{'es' * (len(working) > 1)}" + (f" of {', '.join(users)}" if users else "")
    if gpu.memory_used_bytes is not None:
        allowed = max(FREE_BELOW_BYTES, FREE_BELOW_SHARE * (gpu.memory_total_bytes or 0))
        if gpu.memory_used_bytes >= allowed:
            return f"{gpu.memory_used_bytes / (1 << 20):.0f} MiB in use"
    elif gpu.processes is None:
        return "its use is not reported"
    if gpu.utilization_percent is not None and gpu.utilization_percent >= FREE_BELOW_PERCENT:
        return f"{gpu.utilization_percent:.0f} % utilised"
    return ""


def is_free(gpu: Gpu) -> bool:
    """Whether a recipe's ``gpus = "free"`` takes this GPU."""
    return not why_busy(gpu)


def _gpus() -> tuple[str | None, str | None, tuple[Gpu, ...], str]:
    """Return the driver's version, its CUDA version, the GPUs, and a note about a missing driver or GPU."""
    answers = ask_driver()
    if answers.refusal:
        return None, None, (), answers.refusal
    claim_of = claims([gpu.uuid for gpu in answers.gpus if gpu is not None and gpu.uuid])
    gpus = tuple(
        replace(gpu, processes=_with_owners(gpu.processes), claim=claim_of.get(gpu.uuid))
        for gpu in answers.gpus
        if gpu is not None
    )
    lost = [str(index) for index, gpu in enumerate(answers.gpus) if gpu is None]
    note = f"GPU {', '.join(lost)} does not answer: see dmesg for its Xid error; a reset or a reboot may help"
    return answers.driver, answers.cuda, gpus, note if lost else "" if gpus else "the NVIDIA driver finds no GPU"


def _with_owners(processes: Sequence[GpuProcess] | None) -> tuple[GpuProcess, ...] | None:
    """Return the processes with the user and the name of those that are visible here."""
    if processes is None:
        return None
    owners = [owner_and_name(process.pid) or (None, None) for process in processes]
    return tuple(replace(one, user=user, name=name) for one, (user, name) in zip(processes, owners, strict=True))
