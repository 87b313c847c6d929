"""Samples of a machine: its cores and memory, its GPUs, and the processes of its ranks."""

from __future__ import annotations

import msgspec

from trainer.contract.record.events import Event
from trainer.contract.record.numbers import Count, FiniteFloat, Rank


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sample of a GPU."""

    index: Count
    uuid: str
    rank: Rank | None = None
    utilization_percent: FiniteFloat | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_watts: FiniteFloat | None = None
    temperature_celsius: FiniteFloat | None = None
    sm_clock_mhz: Count | None = None
    max_sm_clock_mhz: Count | None = None
    throttle_reasons: list[str] = []


class RankSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sample of a rank's process."""

    rank: Rank
    cpu_percent: FiniteFloat | None = None
    """In percent of one core: 200 means two busy cores."""
    rss_bytes: Count | None = None
    wait_percent: FiniteFloat | None = None
    """Share of wall time runnable but not running (waiting for a core, throttled), 0 to 100."""
    cpu_quota_cores: FiniteFloat | None = None
    """CPU quota of its cgroup, or of the ancestor that throttles it most."""
    cpu_throttled_percent: FiniteFloat | None = None
    """Share of wall time for which that quota holds its cgroup back, 0 to 100."""
    busy_threads: FiniteFloat | None = None
    """Average number of its threads that run or wait for a core; sampled while the main thread waits for a core at
    least a tenth of the time."""
    children_percent: FiniteFloat | None = None
    """Likewise of all its descendants together; sampled while the process itself is nearly idle."""
    held: str | None = None
    """``T`` if it is stopped by a signal, ``t`` if by a debugger."""
    children: Count | None = None
    """Its child processes, such as loader workers; sampled as ``busy_threads``."""
    log_bytes: Count | None = None
    """Size of its log, from which a reader dates the lines of the log."""
    sleeps_in: str | None = None
    """Kernel function in which its main thread sleeps (``wchan``); sampled while the process is nearly idle."""
    line: str = ""
    """Line of the user's code at which its main thread stays for seconds, such as ``train.py:12 in augment``."""


class NodeSample(Event, kw_only=True, tag="node_sample"):
    """Sample of a machine by its node agent, at most once a second."""

    node: Rank
    host: str
    cpu_percent: FiniteFloat | None = None
    """Use of all cores together, 0 to 100."""
    steal_percent: FiniteFloat | None = None
    cores: Count | None = None
    """Logical cores that the node's processes may use: CPU affinity, cpuset and the quota that the ranks share."""
    machine_cores: Count | None = None
    """Logical cores of the machine."""
    cpuset_cores: Count | None = None
    """Logical cores in the cpuset of the ranks' cgroup."""
    other_cpu_percent: FiniteFloat | None = None
    """CPU time of all processes that are no rank, such as data loading processes, in percent of one core; absent if
    the node may not use all cores of the machine."""
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    """Memory of the machine, or the limit of its container."""
    record_free_bytes: Count | None = None
    """Space left on the disk of this node's record."""
    log_bytes: Count | None = None
    """Size of its node agent's log."""
    ranks: list[RankSample] = []  # noqa: RUF012 - msgspec copies it
    gpus: list[GpuSample] = []  # noqa: RUF012 - likewise
