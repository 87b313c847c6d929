"""Use, memory, temperature and power of each host and GPU over a run. Pure, and of bounded memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan
from typing import Literal

from gputrain_tui.tables import GIB
from trainer.contract.record import NodeSample

Quantity = Literal["use %", "memory GiB", "temperature °C", "power W"]
QUANTITIES: tuple[Quantity, ...] = ("use %", "memory GiB", "temperature °C", "power W")
"""In the order of their lines."""
MAX_POINTS = 1024
"""Points kept of a series; at twice as many, neighbours are averaged, and a line has some hundred columns."""


@dataclass(frozen=True)
class SeriesKey:
    """Machine, device and quantity of a series."""

    machine: int
    """Machine, numbered by its first sample: nodes are numbered anew when the run goes on without one."""
    gpu: int
    """Index of the GPU; -1: the host."""
    quantity: Quantity


@dataclass
class TimeSeries:
    """Values over time in bounded memory: beyond ``2 * MAX_POINTS`` points, neighbours are averaged."""

    limit: float | None = None
    """Greatest possible value: 100 %, or the total memory; None where there is no limit."""
    newest: float = nan
    greatest: float = nan
    _times: array[float] = field(default_factory=lambda: array("d"))
    _values: array[float] = field(default_factory=lambda: array("d"))
    _every: int = 1
    _pending: list[float] = field(default_factory=list)

    def append(self, time: float, value: float) -> None:
        self.newest = value
        self.greatest = value if self.greatest != self.greatest else max(self.greatest, value)
        self._pending.append(value)
        if len(self._pending) < self._every:
            return
        self._times.append(time)
        self._values.append(sum(self._pending) / len(self._pending))
        self._pending.clear()
        if len(self._values) >= 2 * MAX_POINTS:
            self._every *= 2
            pairs = range(0, len(self._values) - 1, 2)
            self._times = array("d", (self._times[index + 1] for index in pairs))
            self._values = array("d", ((self._values[index] + self._values[index + 1]) / 2 for index in pairs))

    def columns(self, begin: float, end: float, count: int) -> list[float]:
        """Return the mean in each of ``count`` columns of a time span, Unix seconds.

        A column without points has the value of the last point before it; NaN before the first point, after the last.
        """
        means = [nan] * count
        if end <= begin:
            return means
        for column in range(count):
            low = bisect_left(self._times, begin + (end - begin) * column / count)
            high = bisect_left(self._times, begin + (end - begin) * (column + 1) / count)
            if column == count - 1:
                high = len(self._times)
            if high > low:
                means[column] = sum(self._values[low:high]) / (high - low)
            elif 0 < low < len(self._times):
                means[column] = self._values[low - 1]
        return means


class HardwareSeries:
    """Series of all hosts and GPUs, changed by ``apply`` only."""

    def __init__(self) -> None:
        self.version = 0
        self.begin = nan
        """First sample, Unix seconds."""
        self.end = nan
        """Newest sample, Unix seconds."""
        self.hosts: list[str] = []
        """Name of each machine; two may have the same."""
        self.machine_of_node: dict[int, int] = {}
        self._series = defaultdict[SeriesKey, TimeSeries](TimeSeries)

    def apply(self, sample: NodeSample) -> None:
        """Apply a node's sample; quantities that it lacks are left out."""
        machine, time = self._machine(sample), sample.time
        self.version += 1
        self.begin = time if self.begin != self.begin else min(self.begin, time)
        self.end = time if self.end != self.end else max(self.end, time)
        self._add(SeriesKey(machine, -1, "use %"), time, sample.cpu_percent, 100.0)
        used, total = sample.memory_used_bytes, sample.memory_total_bytes
        self._add(SeriesKey(machine, -1, "memory GiB"), time, _gib(used), _gib(total))
        for gpu in sample.gpus:
            self._add(SeriesKey(machine, gpu.index, "use %"), time, gpu.utilization_percent, 100.0)
            used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
            self._add(SeriesKey(machine, gpu.index, "memory GiB"), time, _gib(used), _gib(total))
            self._add(SeriesKey(machine, gpu.index, "temperature °C"), time, gpu.temperature_celsius, None)
            self._add(SeriesKey(machine, gpu.index, "power W"), time, gpu.power_watts, None)

    def _machine(self, sample: NodeSample) -> int:
        """Return the number of a sample's machine; a node on another host than before means that all may have moved."""
        known = self.machine_of_node.get(sample.node)
        if known is not None and self.hosts[known] == sample.host:
            return known
        if known is not None:
            self.machine_of_node.clear()
        taken = self.machine_of_node.values()
        free = (machine for machine, host in enumerate(self.hosts) if host == sample.host and machine not in taken)
        machine = next(free, len(self.hosts))
        if machine == len(self.hosts):
            self.hosts.append(sample.host)
        self.machine_of_node[sample.node] = machine
        return machine

    def _add(self, key: SeriesKey, time: float, value: float | None, limit: float | None) -> None:
        if value is None:
            return
        series = self._series[key]
        series.limit = limit
        series.append(time, value)

    def series(self, *, first: int | None = None) -> Iterator[tuple[SeriesKey, TimeSeries]]:
        """Yield all series by node and GPU, those of the node ``first`` before the others, of lost machines last."""
        nodes = {machine: node for node, machine in self.machine_of_node.items()}

        def order(key: SeriesKey) -> tuple[bool, bool, int, int, int]:
            node = nodes.get(key.machine)
            of_quantity = QUANTITIES.index(key.quantity)
            return (
                node is None or node != first,
                node is None,
                key.machine if node is None else node,
                key.gpu,
                of_quantity,
            )

        for key in sorted(self._series, key=order):
            yield key, self._series[key]


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB
