"""Takes the inventory of a machine: GPUs and their processes, cores, memory, load, network addresses.

With ``nvml.py`` it also runs where gputrain is not installed (``inventory_program.py`` packs both): it
needs Python 3.10 and the standard library. Hence frozen dataclasses, which msgspec reads as well. No driver, or a query
that a GPU does not support, is a normal answer; what could not be measured is None, never 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pwd
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.host.nvml import RawGpu, ask_driver

MIB = 1 << 20

FREE_BELOW_BYTES = 500 * MIB
"""An idle GPU still holds this much memory for the driver and a display."""
FREE_BELOW_SHARE = 0.05
"""The same for large GPUs, as a share of their memory."""
FREE_BELOW_PERCENT = 10.0
"""A busier GPU runs a process that this machine cannot see, in a container or a virtual machine."""

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
    """Read the inventory of this machine."""
    driver, cuda, gpus, note = _gpus()
    return Inventory(
        host=socket.gethostname(),
        time=time.time(),
        system=f"{platform.system()} {platform.release()}",
        cpus=_cpus(),
        memory=memory_from(_read("/proc/meminfo")),
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
    """Return why a GPU is not free; empty when it is.

    Free means: no compute process, less memory in use than ``max(500 MiB, 5 %)``, and less than 10 % utilisation. A
    GPU that reports neither its processes nor its memory is not free.
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


# --- what NVML's answers mean ---------------------------------------------------------------------------------------


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
        uuid=raw.uuid or "",
        pci_bus_id=(raw.pci_bus_id or "").lower(),
        name=raw.name or "",
        memory_used_bytes=raw.memory_used,
        memory_total_bytes=raw.memory_total,
        utilization_percent=None if raw.utilization is None else float(raw.utilization),
        temperature_celsius=None if raw.temperature is None else float(raw.temperature),
        power_watts=None if raw.power_mw is None else raw.power_mw / 1000,
        power_limit_watts=None if raw.power_limit_mw is None else raw.power_limit_mw / 1000,
        sm_clock_mhz=raw.sm_clock,
        max_sm_clock_mhz=raw.max_sm_clock,
        throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS if (raw.throttle_mask or 0) & bit),
        mig=raw.mig_mode == 1,
        prohibited=raw.compute_mode == 2,  # NVML_COMPUTEMODE_PROHIBITED
        processes=None if raw.processes is None else tuple(processes[pid] for pid in sorted(processes)),
    )


def _gpus() -> tuple[str | None, str | None, tuple[Gpu, ...], str]:
    """Return the driver's version, its CUDA version, the GPUs, and a note about what is missing."""
    answers = ask_driver()
    if answers.refusal:
        return None, None, (), answers.refusal
    gpus = tuple(gpu_from(raw, _owners(raw)) for raw in answers.gpus if raw is not None)
    lost = [str(index) for index, raw in enumerate(answers.gpus) if raw is None]
    note = f"GPU {', '.join(lost)} does not answer: see dmesg for its Xid error; a reset or a reboot may help"
    return answers.driver, answers.cuda, gpus, note if lost else "" if gpus else "the NVIDIA driver finds no GPU"


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


def _cpus() -> Cpus:
    logical = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    # Threads of one core name each other.
    cores = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    siblings = {_read(str(path)) for path in cores}
    return Cpus(
        model=_cpu_model(_read("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        physical=len(siblings) or None,
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
    found = []
    for _, name in sorted(socket.if_nameindex(), key=lambda entry: entry[1]):
        folder = f"/sys/class/net/{name}"
        addresses = (*_ipv4(name), *ipv6_of(_read("/proc/net/if_inet6"), name))
        # A loopback or a tunnel says "unknown".
        up = _read(f"{folder}/operstate").strip() in ("up", "unknown")
        if name == "lo" or not (addresses or up):
            continue
        speed = _read(f"{folder}/speed").strip()  # -1, or no answer at all, where there is no cable
        found.append(
            Network(name=name, addresses=addresses, up=up, speed_mbits=int(speed) if speed.isdigit() else None)
        )
    return tuple(found)


def _ipv4(name: str) -> tuple[str, ...]:
    """The address of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def ipv6_of(if_inet6: str, name: str) -> tuple[str, ...]:
    """Read ``/proc/net/if_inet6``: the addresses of an interface that hold beyond its link."""
    entries = (line.split() for line in if_inet6.splitlines())
    return tuple(
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
        for words in entries
        if len(words) == 6 and words[5] == name and words[3] != "20"  # scope 0x20: link
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main(words: list[str]) -> None:
    """Print this machine's inventory as one line, after a word that frames it."""
    sys.stdout.write(f"{''.join(words)}{to_json(take_inventory())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
