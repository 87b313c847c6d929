"""What hardware a machine has and who uses it: GPUs through NVML, cores, memory, load and network addresses.

This file runs by itself, also where nothing of gputrain is installed (``python3 - < inventory.py``): it needs Python
3.10 and the standard library. Without nvidia-ml-py it says so instead of listing GPUs, without psutil it reads
``/proc``. Hence frozen dataclasses, which msgspec reads as well. No driver, or a query that a GPU does not support, is
a normal answer; what could not be measured is None, never 0.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import pwd
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20

FREE_BELOW_BYTES = 500 * MIB
"""A GPU that nobody uses still holds this much for the driver and a display."""
FREE_BELOW_SHARE = 0.05
"""The same for large GPUs, as a share of their memory."""
FREE_BELOW_PERCENT = 10.0
"""A busier GPU works for somebody whom this machine does not show, in a container or a virtual machine."""

THROTTLE_REASONS = (
    (0x002, "application_clocks"),
    (0x004, "power_cap"),
    (0x008, "hardware_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "thermal_software"),
    (0x040, "thermal_hardware"),
    (0x080, "power_brake"),
    (0x100, "display_clocks"),
)
"""NVML's bits for why a clock is below its maximum; being idle (0x001) is none of them."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    user: str | None = None
    """Its owner; None for a process that this machine cannot see, in a container for instance."""
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
    """Names of ``THROTTLE_REASONS`` that hold now."""
    mig: bool = False
    """Split into instances (MIG): the GPU as a whole takes no work."""
    prohibited: bool = False
    """Compute mode *prohibited*: no process may use it."""
    processes: tuple[GpuProcess, ...] | None = None
    """None when the driver does not say."""


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """The cores of a machine."""

    model: str = ""
    physical: int | None = None
    logical: int = 1
    usable: int = 1
    """Logical cores that this process may use: CPU affinity and the container's quota."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The main memory of a machine."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """What could be allocated without swapping."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network interface that is not the loopback."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and global IPv6."""
    up: bool = True
    speed_mbits: int | None = None


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
    """Version of the NVIDIA driver; None without one."""
    cuda: str | None = None
    """Newest CUDA version that the driver runs."""
    gpus: tuple[Gpu, ...] = ()
    note: str = ""
    """One line about what could not be found, for people."""


def take_inventory() -> Inventory:
    """Look at this machine."""
    driver, cuda, gpus, note = _gpus()
    return Inventory(
        host=socket.gethostname(),
        time=time.time(),
        system=f"{platform.system()} {platform.release()}",
        cpus=_cpus(),
        memory=_memory(),
        load=_load(),
        uptime_s=_uptime(),
        networks=_networks(),
        driver=driver,
        cuda=cuda,
        gpus=gpus,
        note=note,
    )


def to_json(inventory: Inventory) -> str:
    """Return the inventory as one line of JSON."""
    return json.dumps(asdict(inventory), separators=(",", ":"), ensure_ascii=False)


def why_busy(gpu: Gpu) -> str:
    """Say why a GPU is not free to be taken, or return an empty string when it is.

    Free means: no compute process, less memory in use than ``max(500 MiB, 5 %)``, and less than 10 % utilisation. A
    GPU that answers neither for its processes nor for its memory is not taken for free.
    """
    if gpu.mig:
        return "split into MIG instances"
    if gpu.prohibited:
        return "its compute mode is prohibited"
    working = [process for process in gpu.processes or () if process.kind == "compute"]
    if working:
        users = sorted({process.user for process in working if process.user})
        return f"{len(working)} process{'es' * (len(working) > 1)}" + (f" of {', '.join(users)}" if users else "")
    if gpu.memory_used_bytes is not None:
        allowed = max(FREE_BELOW_BYTES, FREE_BELOW_SHARE * (gpu.memory_total_bytes or 0))
        if gpu.memory_used_bytes >= allowed:
            return f"{gpu.memory_used_bytes / MIB:.0f} MiB in use"
    elif gpu.processes is None:
        return "it does not say who uses it"
    if gpu.utilization_percent is not None and gpu.utilization_percent >= FREE_BELOW_PERCENT:
        return f"{gpu.utilization_percent:.0f} % utilised"
    return ""


def is_free(gpu: Gpu) -> bool:
    """Whether a recipe's ``gpus = "free"`` takes this GPU."""
    return not why_busy(gpu)


# --- readings of NVML, and what they mean -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RawProcess:
    """A running process as NVML reports it."""

    pid: int
    memory: int | None
    """Bytes."""
    kind: str


@dataclass(frozen=True, kw_only=True)
class RawGpu:
    """The answers of NVML for one GPU in NVML's own units; None where it refused."""

    index: int
    uuid: str | bytes | None = None
    pci_bus_id: str | bytes | None = None
    name: str | bytes | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    sm_clock: int | None = None
    max_sm_clock: int | None = None
    throttle_mask: int | None = None
    mig_mode: Sequence[int] | None = None
    """Current and pending."""
    compute_mode: int | None = None
    processes: Sequence[RawProcess] | None = None


def gpu_from(raw: RawGpu, owners: Mapping[int, tuple[str | None, str | None]]) -> Gpu:
    """Turn NVML's answers into a GPU.

    Args:
        raw: the answers.
        owners: pid to user and name, of the processes that this machine can see.
    """
    processes: dict[int, GpuProcess] = {}
    for process in raw.processes or ():
        known = processes.get(process.pid)
        if known is not None:  # listed for compute and for graphics: compute says more
            continue
        user, name = owners.get(process.pid, (None, None))
        processes[process.pid] = GpuProcess(
            pid=process.pid, user=user, name=name, memory_bytes=process.memory, kind=process.kind
        )
    return Gpu(
        index=raw.index,
        uuid=_text(raw.uuid),
        pci_bus_id=_text(raw.pci_bus_id).lower(),
        name=_text(raw.name),
        memory_used_bytes=raw.memory_used,
        memory_total_bytes=raw.memory_total,
        utilization_percent=None if raw.utilization is None else float(raw.utilization),
        temperature_celsius=None if raw.temperature is None else float(raw.temperature),
        power_watts=None if raw.power_mw is None else raw.power_mw / 1000,
        power_limit_watts=None if raw.power_limit_mw is None else raw.power_limit_mw / 1000,
        sm_clock_mhz=raw.sm_clock,
        max_sm_clock_mhz=raw.max_sm_clock,
        throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS if (raw.throttle_mask or 0) & bit),
        mig=bool(raw.mig_mode and raw.mig_mode[0]),
        prohibited=raw.compute_mode == 2,  # NVML_COMPUTEMODE_PROHIBITED
        processes=None if raw.processes is None else tuple(processes[pid] for pid in sorted(processes)),
    )


def _text(value: str | bytes | None) -> str:
    # Old versions of nvidia-ml-py return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


# --- asking NVML ------------------------------------------------------------------------------------------------------


class Nvml:
    """nvidia-ml-py, asked so that a refusal is a value: each GPU and each driver supports other queries."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, *names: str, args: Sequence[Any] = ()) -> Any:
        """Call the first function that there is and that answers; None when none does."""
        for name in names:
            function = getattr(self._module, name, None)
            try:
                if function is not None:
                    return function(*args)
            except self._module.NVMLError:
                continue
        return None

    def raw_gpu(self, index: int) -> RawGpu | None:
        """Ask for everything about one GPU; None when it has fallen off the bus."""
        nvml = self._module
        handle = self.ask("nvmlDeviceGetHandleByIndex", args=(index,))
        if handle is None:
            return None
        of = (handle,)
        # Version 2 does not count what the driver keeps for itself as used.
        memory = self.ask("nvmlDeviceGetMemoryInfo", args=(handle, getattr(nvml, "nvmlMemory_v2", None)))
        memory = memory or self.ask("nvmlDeviceGetMemoryInfo", args=of)
        utilization = self.ask("nvmlDeviceGetUtilizationRates", args=of)
        pci = self.ask("nvmlDeviceGetPciInfo", args=of)
        return RawGpu(
            index=index,
            uuid=self.ask("nvmlDeviceGetUUID", args=of),
            pci_bus_id=getattr(pci, "busId", None),
            name=self.ask("nvmlDeviceGetName", args=of),
            memory_used=getattr(memory, "used", None),
            memory_total=getattr(memory, "total", None),
            utilization=getattr(utilization, "gpu", None),
            temperature=self.ask("nvmlDeviceGetTemperature", args=(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_mw=self.ask("nvmlDeviceGetPowerUsage", args=of),
            power_limit_mw=self.ask("nvmlDeviceGetEnforcedPowerLimit", args=of),
            sm_clock=self.ask("nvmlDeviceGetClockInfo", args=(handle, nvml.NVML_CLOCK_SM)),
            max_sm_clock=self.ask("nvmlDeviceGetMaxClockInfo", args=(handle, nvml.NVML_CLOCK_SM)),
            throttle_mask=self.ask(
                "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", args=of
            ),
            mig_mode=self.ask("nvmlDeviceGetMigMode", args=of),
            compute_mode=self.ask("nvmlDeviceGetComputeMode", args=of),
            processes=self._processes(handle),
        )

    def _processes(self, handle: Any) -> list[RawProcess] | None:
        compute = self.ask("nvmlDeviceGetComputeRunningProcesses", args=(handle,))
        graphics = self.ask("nvmlDeviceGetGraphicsRunningProcesses", args=(handle,))
        if compute is None and graphics is None:
            return None
        return [
            RawProcess(pid=process.pid, memory=process.usedGpuMemory, kind=kind)
            for kind, found in (("compute", compute), ("graphics", graphics))
            for process in found or ()
        ]


def _gpus() -> tuple[str | None, str | None, tuple[Gpu, ...], str]:
    """Return the driver's version, its CUDA version, the GPUs, and a note about what is missing."""
    module = _optional("pynvml")
    if module is None:
        return None, None, (), "GPUs are not listed: nvidia-ml-py is not installed here (pip install nvidia-ml-py)"
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return None, None, (), _without_driver(module, error)
    try:
        nvml = Nvml(module)
        version = nvml.ask("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
        cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
        count = nvml.ask("nvmlDeviceGetCount") or 0
        raws = [nvml.raw_gpu(index) for index in range(count)]
        gpus = tuple(gpu_from(raw, _owners(raw)) for raw in raws if raw is not None)
        lost = [str(index) for index, raw in enumerate(raws) if raw is None]
        note = f"GPU {', '.join(lost)} does not answer: see dmesg for its Xid error; a reset or a reboot may help"
        driver = _text(nvml.ask("nvmlSystemGetDriverVersion")) or None
        return driver, cuda, gpus, note if lost else "" if gpus else "the NVIDIA driver finds no GPU"
    finally:
        module.nvmlShutdown()


def _without_driver(module: Any, error: Exception) -> str:
    notes = {
        "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver on this machine; CPU ranks work",
        "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded: try `nvidia-smi`, then dmesg",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated while loaded: reboot or reload it",
        "NVML_ERROR_NO_PERMISSION": "no permission to use the NVIDIA driver: see the rights of /dev/nvidiactl",
    }
    by_code = {getattr(module, name, None): note for name, note in notes.items()}
    return by_code.get(getattr(error, "value", None), f"the NVIDIA driver refused: {error}")


def _owners(raw: RawGpu) -> dict[int, tuple[str | None, str | None]]:
    owners: dict[int, tuple[str | None, str | None]] = {}
    for process in raw.processes or ():
        folder = Path("/proc") / str(process.pid)
        try:
            uid = folder.stat().st_uid
            name = (folder / "comm").read_text(errors="replace").strip()
        except OSError:
            continue
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        owners[process.pid] = (user, name)
    return owners


# --- the machine ------------------------------------------------------------------------------------------------------


def _optional(name: str) -> Any:
    """A module that may be absent on a host, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _cpus() -> Cpus:
    psutil = _optional("psutil")
    logical = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Cpus(
        model=_cpu_model(_read("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        physical=None if psutil is None else psutil.cpu_count(logical=False),
        logical=logical,
        usable=usable_cores(affinity, _read("/sys/fs/cgroup/cpu.max")),
    )


def usable_cores(affinity: int, cpu_max: str) -> int:
    """Cores that this process gets: its affinity, cut by a container's quota (``cpu.max``: quota and period in µs)."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(affinity, -(-int(quota) // int(period))))
    return affinity


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return " ".join(value.split())
    return ""


def _memory() -> Memory:
    psutil = _optional("psutil")
    if psutil is not None:
        found = psutil.virtual_memory()
        return Memory(total_bytes=found.total, available_bytes=found.available)
    return memory_from(_read("/proc/meminfo"))


def memory_from(meminfo: str) -> Memory:
    """Read ``/proc/meminfo``, which counts in KiB."""
    sizes = {key: words.split() for key, _, words in (line.partition(":") for line in meminfo.splitlines())}
    total, available = (sizes.get(key) for key in ("MemTotal", "MemAvailable"))
    return Memory(
        total_bytes=int(total[0]) * 1024 if total else None,
        available_bytes=int(available[0]) * 1024 if available else None,
    )


def _load() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except OSError:
        return None


def _uptime() -> float | None:
    words = _read("/proc/uptime").split()
    return float(words[0]) if words else None


def _networks() -> tuple[Network, ...]:
    psutil = _optional("psutil")
    if psutil is None:
        return ()
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        texts = tuple(
            address.address
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith("fe80:")
        )
        state = states.get(name)
        if name == "lo" or not (texts or (state and state.isup)):
            continue
        found.append(
            Network(
                name=name,
                addresses=texts,
                up=bool(state and state.isup),
                speed_mbits=state.speed or None if state else None,
            )
        )
    return tuple(found)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdout.write(to_json(take_inventory()) + "\n")
