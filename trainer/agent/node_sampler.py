"""Samples the node's cores, memory, GPUs and rank processes once a second, from the node agent.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.contract.record import EventWriter, GpuSample, NodeSample, RankSample
from trainer.contract.record.regular_file import size_of
from trainer.host.cores import CoreTimes, read_core_times, usable_cores
from trainer.host.memory import read_usable_memory
from trainer.host.proc_files import PROC
from trainer.host.processes import CLOCK_TICKS_HZ, ProcessUsage, busy_ns, read_usage, sleeps_in

if TYPE_CHECKING:
    from trainer.host.nvml import Nvml

ASLEEP_PERCENT = 2.0
"""Of a core: with less a process does next to nothing; two ticks of the kernel's clock in a second."""
WAITS_PERCENT = 10.0
"""Of the time: where its main thread waits so long for a core, all threads of a process are looked at."""


def rank_sample(
    rank: int, before: ProcessUsage | None, after: ProcessUsage, *, seconds: float, tick_hz: int
) -> RankSample:
    """Turn two readings of a rank's process into shares of the time between them."""
    sample = RankSample(rank=rank, rss_bytes=after.rss_bytes, held=after.held)
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
        nvml: The driver; None loads it when there is a GPU to ask about.
    """

    def __init__(self, uuids: Mapping[int, str], nvml: Nvml | None = None) -> None:
        self._handles: dict[str, tuple[Any, int | None]] = {}
        """UUID to handle and rank; a GPU that several ranks share belongs to none."""
        self._nvml = nvml
        if uuids and nvml is None:
            from trainer.host.nvml import load_driver  # ranks on the CPU do not wait for it

            self._nvml = load_driver()
        if not uuids or self._nvml is None or self._nvml.start():
            return
        ranks: dict[str, list[int]] = {}
        for rank, uuid in uuids.items():
            ranks.setdefault(uuid, []).append(rank)
        for uuid, users in ranks.items():
            handle = self._nvml.handle_of(uuid)
            if handle is not None:
                self._handles[uuid] = (handle, users[0] if len(users) == 1 else None)

    def sample(self) -> list[GpuSample]:
        """Ask every GPU; some milliseconds each."""
        return [self._sample(uuid, handle, rank) for uuid, (handle, rank) in self._handles.items()]

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None and self._handles:
            self._handles.clear()
            self._nvml.stop()

    def _sample(self, uuid: str, handle: Any, rank: int | None) -> GpuSample:
        from trainer.host.nvml import throttle_reasons

        assert self._nvml is not None
        index = self._nvml.index_of(handle)
        now = self._nvml.readings(handle)
        return GpuSample(
            index=-1 if index is None else index,
            uuid=uuid,
            rank=rank,
            utilization_percent=now.utilization,
            memory_used_bytes=now.memory_used,
            memory_total_bytes=now.memory_total,
            power_watts=None if now.power_mw is None else now.power_mw / 1000,
            temperature_celsius=now.temperature,
            sm_clock_mhz=now.sm_clock,
            max_sm_clock_mhz=now.max_sm_clock,
            throttle_reasons=list(throttle_reasons(now.throttle_mask)),
        )


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
        log_of: Rank to its log, whose size is sampled; None: none is.
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
        log_of: Callable[[int], Path] | None = None,
        interval_s: float = 1.0,
        proc: Path = PROC,
    ) -> None:
        self._node = node
        self._host = host
        self._pids = pids
        self._writer = writer
        self._interval_s = interval_s
        self._proc = proc
        self._gpus = gpus
        self._log_of = log_of
        self._last: float | None = None
        self._usable_cores = usable_cores()
        self._cores: CoreTimes | None = None
        self._processes: dict[int, ProcessUsage] = {}
        self._busy_ns: dict[int, dict[str, int]] = {}
        """By rank, of those whose threads were looked at in the last sample."""

    def poll(self, now: float) -> NodeSample | None:
        """Take a sample when one is due, write it and return it.

        Args:
            now: Unix seconds.
        """
        if not self._writer.enabled or (self._last is not None and 0 <= now - self._last < self._interval_s):
            return None
        seconds = 0.0 if self._last is None else now - self._last
        self._last = now
        memory = read_usable_memory(self._proc)
        sample = NodeSample(
            time=now,
            node=self._node,
            host=self._host,
            cores=self._usable_cores,
            memory_used_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
        )
        before, after = self._cores, read_core_times(self._proc)
        if before is not None and after is not None and after.total > before.total:
            ticks = after.total - before.total
            sample.cpu_percent = _percent(after.busy - before.busy, ticks)
            sample.steal_percent = _percent(after.stolen - before.stolen, ticks)
        self._cores = after
        processes: dict[int, ProcessUsage] = {}
        threads: dict[int, dict[str, int]] = {}
        for rank, pid in sorted(self._pids.items()):
            process = read_usage(pid, proc=self._proc)
            if process is None:
                continue  # it has ended
            earlier = self._processes.get(rank)
            of_rank = rank_sample(rank, earlier, process, seconds=seconds, tick_hz=CLOCK_TICKS_HZ)
            if of_rank.cpu_percent is not None and of_rank.cpu_percent < ASLEEP_PERCENT:
                of_rank.sleeps_in = sleeps_in(pid, proc=self._proc)
            if (of_rank.wait_percent or 0.0) >= WAITS_PERCENT:
                threads[rank] = busy_ns(pid, proc=self._proc)
                if rank in self._busy_ns:
                    known = self._busy_ns[rank]
                    busy = sum(total - known.get(thread, 0) for thread, total in threads[rank].items())
                    of_rank.busy_threads = round(busy / 1e9 / seconds, 1)
            if self._log_of is not None:
                of_rank.log_bytes = size_of(self._log_of(rank))
            sample.ranks.append(of_rank)
            processes[rank] = process
        self._processes, self._busy_ns = processes, threads
        if before is not None and after is not None and seconds > 0 and self._usable_cores == os.cpu_count():
            others = after.busy - after.stolen - before.busy + before.stolen
            others_percent = _percent(others / CLOCK_TICKS_HZ, seconds)
            sample.other_cpu_percent = max(
                0.0, round(others_percent - sum(r.cpu_percent or 0 for r in sample.ranks), 1)
            )
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
