"""One step of all ranks side by side: what each did since the last synchronisation, net of waiting for a core.

All ranks leave a synchronisation at about the same moment. So what makes one late for the next is all that it did
since: the end of the last step (optimizer, logging) and this step's data, forward and backward. On a busy machine
most of the difference between two steps is waiting for a core. The record tells that apart, and so do these rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from gputrain_tui.diagnosis.statistics import excess, median, median_low, median_without

PHASES = ("data", "h2d", "forward", "backward", "optimizer", "other")
"""What a rank does between two synchronisations; ``other`` is what no phase of the step accounts for."""


class Cycle(NamedTuple):
    """What one rank did from one synchronisation to the next; ms, without the waits for a core."""

    data: float
    h2d: float
    forward: float
    backward: float
    optimizer: float
    other: float
    own: float
    """All of the above."""
    core_wait: float
    """Ready to run and without a core, over the whole cycle."""
    core_wait_before: float
    """Of that, what came before the forward pass."""
    gc: float
    """In Python's garbage collector; lies within the other phases."""
    exposed: float | None
    """Waited for the synchronisation that ends the cycle; None where nothing was synchronised or measured."""
    wire: float | None
    """The same without the wait for a core at its end."""
    step: float
    """Duration of the whole step, as the clock saw it."""

    @property
    def before_forward(self) -> float:
        """All that comes before the forward pass, by the clock: whoever waits there waits for all of it."""
        return self.optimizer + self.other + self.data + self.h2d + self.core_wait_before


class CycleRow:
    """The cycles of all ranks at one step, or their means over as many steps as an event covers."""

    def __init__(self, step: int, cycles: Sequence[Cycle], steps: int = 1) -> None:
        self.step = step
        """Number of the step; the last one where it stands for several."""
        self.steps = steps
        """How many it stands for."""
        self.cycles = cycles
        """In the order of the ranks."""
        self.troubled = False
        """Whether a rank was known to be late meanwhile: then it says nothing about the usual noise."""
        self._sorted: dict[str, list[float]] = {}
        self._relieved: tuple[object, CycleRow] | None = None

    @cached_property
    def synced(self) -> bool:
        """Whether every rank told what it waited for the synchronisation: else nobody can say who was late."""
        return all(cycle.exposed is not None for cycle in self.cycles)

    @cached_property
    def own_ms(self) -> float:
        """The usual rank's own work."""
        return median_low([cycle.own for cycle in self.cycles])

    @cached_property
    def wire_ms(self) -> float | None:
        """What the last rank to arrive waited, which is the bare transfer."""
        return min(cycle.wire for cycle in self.cycles if cycle.wire is not None) if self.synced else None

    @cached_property
    def step_ms(self) -> float:
        """The usual rank's step by the clock."""
        return median([cycle.step for cycle in self.cycles])

    @cached_property
    def compute_ms(self) -> float:
        """The usual rank's forward and backward."""
        return median([cycle.forward + cycle.backward for cycle in self.cycles])

    @cached_property
    def core_wait_ms(self) -> float:
        """The usual rank's wait for a core."""
        return median(self._column("core_wait"))

    @cached_property
    def own_excess(self) -> list[float]:
        """Per rank, by how much its own work exceeds the other ranks' median, ms."""
        return excess([cycle.own for cycle in self.cycles])

    @cached_property
    def core_wait_excess(self) -> list[float]:
        """Likewise its wait for a core."""
        waits = [cycle.core_wait for cycle in self.cycles]
        return excess(waits) if any(waits) else [0.0] * len(waits)

    @cached_property
    def before_forward(self) -> list[float]:
        """Per rank what comes before its forward pass, ms."""
        return [cycle.before_forward for cycle in self.cycles]

    def excess(self, phase: str, index: int) -> float:
        """Return by how much one rank's phase exceeds the other ranks' median, ms."""
        value: float = getattr(self.cycles[index], phase)
        ranked = self._column(phase)
        return value - median_without(ranked, bisect_left(ranked, value)) if len(ranked) > 1 else 0.0

    def late_ms(self, index: int) -> float:
        """Return how late a rank was as the synchronisation shows it: the longest wait less its own, ms."""
        return max(cycle.exposed or 0.0 for cycle in self.cycles) - (self.cycles[index].exposed or 0.0)

    def relieved(self, leader: int, followers: frozenset[int]) -> CycleRow:
        """Return the row without what some ranks wait for another in their forward pass.

        Args:
            leader: index of the rank that the others wait for.
            followers: indices of those that wait.
        """
        about = leader, followers
        if self._relieved is None or self._relieved[0] != about:
            first = self.cycles[leader]
            cycles = list(self.cycles)
            for index in followers:
                cycle = cycles[index]
                lead = first.before_forward - cycle.before_forward
                wait = max(0.0, min(cycle.forward - first.forward, lead))
                cycles[index] = cycle._replace(forward=cycle.forward - wait, own=cycle.own - wait)
            relieved = CycleRow(self.step, cycles, self.steps)
            relieved.troubled = self.troubled
            self._relieved = about, relieved
        return self._relieved[1]

    def _column(self, phase: str) -> list[float]:
        """Return one phase of all ranks, ascending."""
        ranked = self._sorted.get(phase)
        if ranked is None:
            ranked = self._sorted[phase] = sorted(map(attrgetter(phase), self.cycles))
        return ranked


def base_ms(rows: Sequence[CycleRow]) -> float:
    """Return a step as it would be with a core for everybody and nobody late: the usual work and the bare transfer."""
    return median([row.own_ms for row in rows]) + (wire_ms(rows) or 0.0)


def wire_ms(rows: Sequence[CycleRow]) -> float | None:
    """Return the bare transfer that nothing hides (lower quartile); None where it was not measured."""
    waits = sorted(row.wire_ms for row in rows if row.wire_ms is not None)
    return waits[len(waits) // 4] if waits else None
