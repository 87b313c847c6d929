"""Samples the node's cores, memory, GPUs and rank processes once a second, from the node agent.

Torch-free: /proc for processes and cores, NVML for GPUs. Reading text is separate from finding it, so that the
arithmetic is tested on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.record import EventWriter, GpuSample, NodeSample, RankSample

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
"""NVML's bits for why a clock is below its maximum, named as the inventory names them; idle (0x001) is none."""
ASLEEP_PERCENT = 2.0
"""Of a core: with less a process does next to nothing; two ticks of the kernel's clock in a second."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Time of all cores together since boot, in clock ticks."""

    total: int
    busy: int
    stolen: int
    """Taken by other guests of the same host."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process since it began."""

    ticks: int | None
    """Processor time of all its threads, user and system."""
    rss_bytes: int | None
    wait_ns: int | None
    """Time that its main thread was runnable and did not run."""


def parse_cores(stat: str) -> Cores | None:
    """Read the first line of ``/proc/stat``: user nice system idle iowait irq softirq steal guest guest_nice."""
    words = stat.split("\n", 1)[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    fields = [int(word) for word in words[1:9]]  # guest time is part of user time
    total = sum(fields)
    return Cores(total=total, busy=total - fields[3] - fields[4], stolen=fields[7])


def parse_memory(meminfo: str) -> tuple[int | None, int | None]:
    """Read used and total bytes from ``/proc/meminfo``; what the kernel can give back at once is not used."""
    kib: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            kib[name] = int(rest.split()[0])
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None:
        return None, None
    return (None if available is None else (total - available) * 1024), total * 1024


def parse_process(stat: str, statm: str, schedstat: str, *, page_bytes: int) -> Process:
    """Read ``/proc/PID/stat``, ``statm`` and ``schedstat``; an empty text is a file that is not there."""
    # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    pages, waits = statm.split(), schedstat.split()
    return Process(
        ticks=int(fields[11]) + int(fields[12]) if len(fields) > 12 else None,
        rss_bytes=int(pages[1]) * page_bytes if len(pages) > 1 else None,
        wait_ns=int(waits[1]) if len(waits) > 1 else None,
    )


def parse_wchan(wchan: str) -> str | None:
    """Read ``/proc/PID/wchan``; None where the process runs, or the kernel does not tell."""
    return None if wchan in ("", "0") else wchan


def rank_sample(rank: int, before: Process | None, after: Process, *, seconds: float, tick_hz: int) -> RankSample:
    """Turn two readings of a rank's process into shares of the time between them."""
    sample = RankSample(rank=rank, rss_bytes=after.rss_bytes)
    if before is None or seconds <= 0:
        return sample
    if before.ticks is not None and after.ticks is not None:
        sample.cpu_percent = _percent((after.ticks - before.ticks) / tick_hz, seconds)
    if before.wait_ns is not None and after.wait_ns is not None:
        sample.wait_percent = min(100.0, _percent((after.wait_ns - before.wait_ns) / 1e9, seconds))
    return sample


def _percent(part: float, whole: float) -> float:
    return round(max(0.0, 100.0 * part / whole), 1)


class Gpus:
    """The GPUs that this node's ranks use, asked through NVML; what a card does not tell is absent.

    Args:
        uuids: Rank to the UUID of its GPU.
        nvml: The ``pynvml`` module; None imports it when there is a GPU to ask about.
    """

    def __init__(self, uuids: Mapping[int, str], nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: dict[str, tuple[Any, int | None]] = {}
        """UUID to handle and rank; a GPU that several ranks share belongs to none."""
        if uuids and nvml is None:
            try:
                import pynvml
            except ImportError:
                return
            self._nvml = pynvml
        if not uuids or self._ask("nvmlInit", default=False) is False:
            return
        ranks: dict[str, list[int]] = {}
        for rank, uuid in uuids.items():
            ranks.setdefault(uuid, []).append(rank)
        for uuid, users in ranks.items():
            handle = self._ask("nvmlDeviceGetHandleByUUID", uuid)
            if handle is not None:
                self._handles[uuid] = (handle, users[0] if len(users) == 1 else None)

    def sample(self) -> list[GpuSample]:
        """Ask every GPU; some milliseconds each."""
        return [self._sample(uuid, handle, rank) for uuid, (handle, rank) in self._handles.items()]

    def close(self) -> None:
        """Let go of the driver."""
        if self._handles:
            self._handles.clear()
            self._ask("nvmlShutdown")

    def _sample(self, uuid: str, handle: Any, rank: int | None) -> GpuSample:
        nvml = self._nvml
        utilization = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        # The newer of the two names for the same question is missing in older bindings.
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            index=self._ask("nvmlDeviceGetIndex", handle, default=-1),
            uuid=uuid,
            rank=rank,
            utilization_percent=getattr(utilization, "gpu", None),
            memory_used_bytes=getattr(memory, "used", None),
            memory_total_bytes=getattr(memory, "total", None),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            max_sm_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            throttle_reasons=[name for bit, name in THROTTLE_REASONS if (reasons or 0) & bit],
        )

    def _ask(self, function: str, *arguments: Any, default: Any = None) -> Any:
        try:
            call = getattr(self._nvml, function)
            return call(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return default


def gpus_of(devices: Mapping[int, str]) -> Gpus | None:
    """Return the GPUs that ranks were given, None for CPU ranks.

    Args:
        devices: rank to what its device is called in the record, ``cpu`` or ``cuda:<index> <UUID or name>``.
    """
    uuids = {rank: uuid for rank, device in devices.items() if (uuid := device.partition(" ")[2]).startswith("GPU-")}
    return Gpus(uuids) if uuids else None


class NodeSampler:
    """Writes a ``node_sample`` event once a second.

    Args:
        node: Index of the node in the plan.
        host: Name of this machine.
        pids: Rank to process id; read at each sample, so ranks may be added and taken away.
        gpus: The GPUs of this node's ranks; None for CPU ranks.
        writer: Where events go; when it is not enabled nothing is read.
        interval_s: Least time between two samples.
        proc: Where the process file system is.
    """

    def __init__(
        self,
        node: int,
        host: str,
        pids: Mapping[int, int],
        *,
        writer: EventWriter,
        gpus: Gpus | None = None,
        interval_s: float = 1.0,
        proc: Path = Path("/proc"),
    ) -> None:
        self._node = node
        self._host = host
        self._pids = pids
        self._writer = writer
        self._interval_s = interval_s
        self._proc = proc
        self._gpus = gpus
        self._tick_hz = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._last: float | None = None
        self._cores: Cores | None = None
        self._processes: dict[int, Process] = {}

    def poll(self, now: float) -> NodeSample | None:
        """Take a sample when one is due, write it and return it.

        Args:
            now: Unix seconds.
        """
        if not self._writer.enabled or (self._last is not None and 0 <= now - self._last < self._interval_s):
            return None
        seconds = 0.0 if self._last is None else now - self._last
        self._last = now
        used, total = parse_memory(self._read("meminfo"))
        sample = NodeSample(
            time=now, node=self._node, host=self._host, memory_used_bytes=used, memory_total_bytes=total
        )
        before, after = self._cores, parse_cores(self._read("stat"))
        if before is not None and after is not None and after.total > before.total:
            ticks = after.total - before.total
            sample.cpu_percent = _percent(after.busy - before.busy, ticks)
            sample.steal_percent = _percent(after.stolen - before.stolen, ticks)
        self._cores = after
        processes: dict[int, Process] = {}
        for rank, pid in sorted(self._pids.items()):
            stat = self._read(f"{pid}/stat")
            if not stat:
                continue  # it has ended
            process = parse_process(
                stat, self._read(f"{pid}/statm"), self._read(f"{pid}/schedstat"), page_bytes=self._page_bytes
            )
            earlier = self._processes.get(rank)
            of_rank = rank_sample(rank, earlier, process, seconds=seconds, tick_hz=self._tick_hz)
            if of_rank.cpu_percent is not None and of_rank.cpu_percent < ASLEEP_PERCENT:
                of_rank.sleeps_in = parse_wchan(self._read(f"{pid}/wchan"))
            sample.ranks.append(of_rank)
            processes[rank] = process
        self._processes = processes
        if self._gpus is not None:
            sample.gpus = self._gpus.sample()
        self._writer.write(sample)
        return sample

    def watch_gpus(self, gpus: Gpus | None) -> None:
        """Look at these from now on: where ranks start one by one, theirs are known only then."""
        self.close()
        self._gpus = gpus

    def close(self) -> None:
        """Let go of the GPUs."""
        if self._gpus is not None:
            self._gpus.close()

    def _read(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:
            return ""
