"""Sampler of the node's cores, memory, GPUs and rank processes, run by the node agent; torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.contract.record import EventWriter, GpuSample, NodeSample, RankSample, RunDir
from trainer.contract.record.regular_file import size_of
from trainer.host.cores import CoreTimes, read_core_times, usable_cores
from trainer.host.cpu_cgroup import CpuCgroup, CpuQuota, affinity, cpu_cgroup
from trainer.host.memory import read_usable_memory
from trainer.host.proc_files import PROC
from trainer.host.processes import (
    CLOCK_TICKS_HZ,
    ProcessUsage,
    busy_ns,
    child_count,
    descendants_of_each,
    read_usage,
    sleeps_in,
)
from trainer.host.resource_limits import free_bytes

if TYPE_CHECKING:
    from trainer.host.nvml import Nvml

SAMPLE_S = 1.0
"""Minimum time between two samples."""
ASLEEP_PERCENT = 2.0
"""Use of a core below which a process counts as asleep; two ticks of the kernel's clock in a second."""


def rank_sample(rank: int, before: ProcessUsage | None, after: ProcessUsage, *, seconds: float) -> RankSample:
    """Return the sample of a rank from two readings of its process, with shares of the time between them."""
    sample = RankSample(rank=rank, rss_bytes=after.rss_bytes, held=after.held)
    if before is None or seconds <= 0:
        return sample
    if before.ticks is not None and after.ticks is not None:
        sample.cpu_percent = _percent((after.ticks - before.ticks) / CLOCK_TICKS_HZ, seconds)
    if before.wait_ns is not None and after.wait_ns is not None:
        sample.wait_percent = min(100.0, _percent((after.wait_ns - before.wait_ns) / 1e9, seconds))
    return sample


def _percent(part: float, whole: float) -> float:
    return round(max(0.0, 100.0 * part / whole), 1)


class Gpus:
    """GPUs of this node's ranks, sampled through NVML; values that a GPU does not report are absent."""

    def __init__(self, uuids: Mapping[int, str], nvml: Nvml | None) -> None:
        self._handles: dict[str, tuple[Any, int, int | None]] = {}
        """UUID to handle, index in PCI order, and rank; None for a GPU that several ranks share."""
        self._nvml = nvml
        if nvml is None or nvml.start():
            return
        ranks: dict[str, list[int]] = {}
        for rank, uuid in uuids.items():
            ranks.setdefault(uuid, []).append(rank)
        for uuid, users in ranks.items():
            handle = nvml.handle_of(uuid)
            # Read once: a GPU that falls off the bus later has no index any more, which every sample needs.
            index = None if handle is None else nvml.index_of(handle)
            if index is not None:
                self._handles[uuid] = (handle, index, users[0] if len(users) == 1 else None)

    def sample(self) -> list[GpuSample]:
        """Return a sample of every GPU; each takes some milliseconds."""
        return [self._sample(uuid, *entry) for uuid, entry in self._handles.items()]

    def close(self) -> None:
        if self._nvml is not None and self._handles:
            self._handles.clear()
            self._nvml.stop()

    def _sample(self, uuid: str, handle: Any, index: int, rank: int | None) -> GpuSample:
        assert self._nvml is not None
        readings = vars(self._nvml.readings(handle))
        reasons = list(readings["throttle_reasons"])
        return GpuSample(index=index, uuid=uuid, rank=rank, **(readings | {"throttle_reasons": reasons}))


def gpus_of(devices: Mapping[int, str]) -> Gpus | None:
    """Return the GPUs of ranks, by the labels of their devices (``visible_devices.label``); None for CPU ranks."""
    uuids = {rank: uuid for rank, device in devices.items() if (uuid := device.partition(" ")[2]).startswith("GPU-")}
    if not uuids:
        return None
    from trainer.host.nvml import load_driver  # CPU ranks need not import it

    return Gpus(uuids, load_driver())


class NodeSampler:
    """Sampler that writes a ``node_sample`` event once a second.

    Args:
        node: index of the node in the plan.
        host: name of this machine.
        pids: rank to process id; read at each sample, so ranks may be added and removed.
        gpus: the GPUs of this node's ranks; None for CPU ranks.
        writer: writer of the events; if it is not enabled, nothing is sampled.
        run_dir: the record, for the size of the ranks' logs and the free space of its disk.
        line_of: returns the line of the user's code at which a rank stays; empty if none.
        proc: mount point of procfs.
    """

    def __init__(
        self,
        node: int,
        host: str,
        pids: Mapping[int, int],
        *,
        writer: EventWriter,
        gpus: Gpus | None = None,
        run_dir: RunDir | None = None,
        line_of: Callable[[int], str] = lambda _: "",
        proc: Path = PROC,
    ) -> None:
        self._node = node
        self._host = host
        self._pids = pids
        self._writer = writer
        self._proc = proc
        self._gpus = gpus
        self._run_dir = run_dir
        self._line_of = line_of
        self._last: float | None = None
        self._quotas: dict[Path, CpuQuota] = {}
        """Quotas that hold for ranks, by folder of their cgroup."""
        self._cores: CoreTimes | None = None
        self._processes: dict[int, ProcessUsage] = {}
        self._busy_ns: dict[int, dict[str, int]] = {}
        """Rank to ``busy_ns`` of its process, for ranks whose threads were in the last sample."""
        self._children: dict[int, dict[int, int]] = {}
        """Rank to the clock ticks of its descendants by pid, for ranks that were nearly idle in the last sample."""

    def poll(self, now: float) -> NodeSample | None:
        """Take a sample when one is due, at ``now`` in Unix seconds, write it and return it."""
        if not self._writer.enabled or (self._last is not None and 0 <= now - self._last < SAMPLE_S):
            return None
        seconds = 0.0 if self._last is None else now - self._last
        self._last = now
        memory = read_usable_memory(self._proc)
        sample = NodeSample(
            time=now,
            node=self._node,
            host=self._host,
            machine_cores=os.cpu_count(),
            memory_used_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
        )
        before, after = self._cores, read_core_times(self._proc)
        if before is not None and after is not None and after.total > before.total:
            ticks = after.total - before.total
            sample.cpu_percent = _percent(after.busy - before.busy, ticks)
            sample.steal_percent = _percent(after.stolen - before.stolen, ticks)
        self._cores = after
        pids = self._sample_ranks(sample, seconds)
        self._sample_limits(sample, pids, seconds)
        self._sample_children(sample.ranks, seconds)
        if before is not None and after is not None and seconds > 0 and sample.cores == sample.machine_cores:
            others = after.busy - after.stolen - before.busy + before.stolen
            others_percent = _percent(others / CLOCK_TICKS_HZ, seconds)
            of_ranks = sum(of_rank.cpu_percent or 0 for of_rank in sample.ranks)
            sample.other_cpu_percent = max(0.0, round(others_percent - of_ranks, 1))
        if self._gpus is not None:
            sample.gpus = self._gpus.sample()
        if self._run_dir is not None:
            sample.record_free_bytes = free_bytes(self._run_dir.events)
            sample.log_bytes = size_of(self._run_dir.node_log(self._node))
        self._writer.write(sample)
        return sample

    def _sample_ranks(self, sample: NodeSample, seconds: float) -> dict[int, int]:
        """Sample the processes of the ranks that have not ended; return these by rank."""
        # Share of the time that a main thread waits for a core, from which on all threads of its process are sampled.
        waits_percent = 10.0
        processes: dict[int, ProcessUsage] = {}
        pids: dict[int, int] = {}
        threads: dict[int, dict[str, int]] = {}
        for rank, pid in sorted(self._pids.items()):
            process = read_usage(pid, proc=self._proc)
            if process is None:
                continue  # it has ended
            processes[rank], pids[rank] = process, pid
            of_rank = rank_sample(rank, self._processes.get(rank), process, seconds=seconds)
            if of_rank.cpu_percent is not None and of_rank.cpu_percent < ASLEEP_PERCENT:
                of_rank.sleeps_in = sleeps_in(pid, proc=self._proc)
            if (of_rank.wait_percent or 0.0) >= waits_percent:
                threads[rank] = busy_ns(pid, proc=self._proc)
                of_rank.children = child_count(pid, proc=self._proc)
                if rank in self._busy_ns:
                    previous = self._busy_ns[rank]
                    busy = sum(total - previous.get(thread, 0) for thread, total in threads[rank].items())
                    of_rank.busy_threads = round(busy / 1e9 / seconds, 1)
            of_rank.line = self._line_of(rank)
            if self._run_dir is not None:
                of_rank.log_bytes = size_of(self._run_dir.rank_log(rank))
            sample.ranks.append(of_rank)
        self._processes, self._busy_ns = processes, threads
        return pids

    def _sample_limits(self, sample: NodeSample, pids: Mapping[int, int], seconds: float) -> None:
        """Sample the cores that the ranks may use, and the time for which CPU quotas hold them back."""
        quotas: dict[Path, CpuQuota] = {}
        of_cgroups: dict[CpuCgroup, dict[Path, CpuQuota]] = {}
        cores: set[int] = set()
        for of_rank in sample.ranks:
            pid = pids[of_rank.rank]
            cgroup = cpu_cgroup(pid, proc=self._proc)
            if cgroup not in of_cgroups:
                of_cgroups[cgroup] = cgroup.quotas()
                quotas |= of_cgroups[cgroup]
                sample.cpuset_cores = sample.cpuset_cores or cgroup.cpuset_cores()
            cores |= affinity(pid, proc=self._proc)
            shares = [
                (quota.held_back_share(self._quotas[folder], seconds), -quota.cores)
                for folder, quota in of_cgroups[cgroup].items()
                if folder in self._quotas and seconds > 0
            ]
            if shares:
                share, negative = max(shares)
                of_rank.cpu_throttled_percent, of_rank.cpu_quota_cores = round(100 * share, 1), -negative
        self._quotas = quotas
        shared = (quota for folder, quota in quotas.items() if all(folder in each for each in of_cgroups.values()))
        usable = min([float(len(cores) or usable_cores()), *(quota.cores for quota in shared)])
        sample.cores = max(1, int(usable))

    def _sample_children(self, ranks: Sequence[RankSample], seconds: float) -> None:
        """Sample the processes that nearly idle ranks have started, such as those of ``mp.spawn``: they may train."""
        idle = {
            self._pids[sample.rank]: sample
            for sample in ranks
            if sample.cpu_percent is not None and sample.cpu_percent < ASLEEP_PERCENT and sample.rank in self._pids
        }
        of_pid = descendants_of_each(idle, proc=self._proc) if idle else {}
        children = {idle[pid].rank: ticks for pid, ticks in of_pid.items()}
        for sample in idle.values():
            before = self._children.get(sample.rank)
            if before is not None and seconds > 0:
                used = sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in children[sample.rank].items())
                sample.children_percent = _percent(used / CLOCK_TICKS_HZ, seconds)
        self._children = children

    def watch_gpus(self, gpus: Gpus | None) -> None:
        """Replace the sampled GPUs; under a launcher they are known only after all ranks have started."""
        self.close()
        self._gpus = gpus

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
