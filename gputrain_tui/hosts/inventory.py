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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.host.addresses import Network, networks
from trainer.host.boot import uptime_s
from trainer.host.cores import Cpus, load_average, read_cpus
from trainer.host.gpu_claims import GpuClaim, claims
from trainer.host.memory import Memory, read_usable_memory
from trainer.host.nvml import RawGpu, ask_driver
from trainer.host.processes import owner_and_name

FREE_BELOW_BYTES = 500 << 20
"""Memory that the driver and a display may hold on an idle GPU."""
FREE_BELOW_SHARE = 0.05
"""The same as a share of a GPU's memory; the larger of both counts."""
FREE_BELOW_PERCENT = 10.0
"""A GPU with more utilisation runs a process of a container or a virtual machine that is invisible here."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    user: str | None = None
    """Its owner; None for a process that is invisible here, in a container for instance."""
    name: str | None = None
    memory_bytes: int | None = None
    kind: str = "compute"
    """``compute`` or ``graphics``."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """NVML's index: PCI order."""
    uuid: str
    pci_bus_id: str = ""
    name: str = ""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as 8 and 0."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    """Share of the last sampling period in which any kernel ran, 0 to 100."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Reasons for a clock below its maximum at that moment: names of ``trainer.host.nvml.THROTTLE_REASONS``."""
    mig: bool = False
    """Whether it is split into instances (MIG): no process can use it as a whole."""
    prohibited: bool = False
    """Whether its compute mode is *prohibited*: no process may use it."""
    processes: tuple[GpuProcess, ...] | None = None
    """None if the driver does not report them."""
    claim: GpuClaim | None = None
    """The run that claimed it, possibly before the driver shows a process; None if unclaimed."""


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


# --- NVML's answers ---------------------------------------------------------------------------------------


def gpu_from(raw: RawGpu, owners: Mapping[int, tuple[str, str]], claim: GpuClaim | None = None) -> Gpu:
    """Turn NVML's answers into a GPU; ``owners`` has user and name by pid."""
    processes: dict[int, GpuProcess] = {}
    for process in raw.processes or ():
        if process.pid in processes:  # listed for compute and for graphics: compute comes first and is kept
            continue
        user, name = owners.get(process.pid, (None, None))
        processes[process.pid] = GpuProcess(
            pid=process.pid, user=user, name=name, memory_bytes=process.memory, kind=process.kind
        )
    return Gpu(
        index=raw.index,
        uuid=raw.uuid or "",
        pci_bus_id=(raw.pci_bus_id or "").lower(),
        name=raw.name or "",
        capability=raw.capability,
        power_limit_watts=raw.power_limit_watts,
        mig=raw.mig,
        prohibited=raw.compute_mode == 2,  # NVML_COMPUTEMODE_PROHIBITED
        processes=None if raw.processes is None else tuple(processes[pid] for pid in sorted(processes)),
        claim=claim,
        **vars(raw.readings),
    )


def _gpus() -> tuple[str | None, str | None, tuple[Gpu, ...], str]:
    """Return the driver's version, its CUDA version, the GPUs, and a note about a missing driver or GPU."""
    answers = ask_driver()
    if answers.refusal:
        return None, None, (), answers.refusal
    claim_of = claims([raw.uuid for raw in answers.gpus if raw is not None and raw.uuid])
    gpus = tuple(gpu_from(raw, _owners(raw), claim_of.get(raw.uuid or "")) for raw in answers.gpus if raw is not None)
    lost = [str(index) for index, raw in enumerate(answers.gpus) if raw is None]
    note = f"GPU {', '.join(lost)} does not answer: see dmesg for its Xid error; a reset or a reboot may help"
    return answers.driver, answers.cuda, gpus, note if lost else "" if gpus else "the NVIDIA driver finds no GPU"


def _owners(raw: RawGpu) -> dict[int, tuple[str, str]]:
    owners = ((process.pid, owner_and_name(process.pid)) for process in raw.processes or ())
    return {pid: owner for pid, owner in owners if owner is not None}
