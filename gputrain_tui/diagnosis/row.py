"""One step of all ranks: the phases of each since the last synchronisation, without its waits for a core.

All ranks leave a synchronisation at about the same moment. A rank's lateness for the next one therefore comes from all
of its work since: the end of the last step (optimizer, logging) and this step's data, forward and backward. On a busy
machine most of the difference between two steps is waiting for a core, which the record and these rows keep separate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median, median_low
from typing import NamedTuple

from gputrain_tui.diagnosis.statistics import excess, lower_quartile, median_without
from gputrain_tui.state.process_groups import ProcessGroup, least_transfer_ms
from gputrain_tui.state.synchronisation import late_ms

PHASES = ("data", "h2d", "forward", "backward", "optimizer", "other")
"""Phases between two synchronisations; ``other`` is the unmeasured rest of the step."""
DEVICE_PHASES = ("forward", "backward", "optimizer")
"""Those that a slower device makes longer."""


class StepPhases(NamedTuple):
    """Phases of one rank from one synchronisation to the next; ms, without the waits for a core."""

    data: float
    h2d: float
    forward: float
    backward: float
    optimizer: float
    other: float
    own: float
    """Sum of the above."""
    core_wait: float
    """Time in which it was runnable without a core, from one synchronisation to the next."""
    core_wait_before: float
    """Part of ``core_wait`` before the forward pass."""
    gc: float
    """Time in Python's garbage collector, within the other phases."""
    exposed: float | None
    """Wait for the synchronisation at the end; None where nothing was synchronised or measured."""
    wire: float | None
    """``exposed`` without the wait for a core at its end."""
    step: float
    """Duration of the whole step by the clock."""
    samples: float | None
    tokens: float | None
    """Tokens that this rank read in the step; None where the task counts none."""

    @property
    def before_forward(self) -> float:
        """Time before the forward pass, waits for a core included: other ranks may wait for all of it."""
        return self.optimizer + self.other + self.data + self.h2d + self.core_wait_before


@dataclass(eq=False)
class StepRow:
    """The phases of all ranks at one step, or their means over the steps of one event."""

    step: int
    """Number of the step; of the last one where the row covers several."""
    phases: Sequence[StepPhases]
    """In the order of the ranks."""
    waits: Sequence[tuple[float, ...]]
    """Per step the ranks' waits for the synchronisation, ms; empty where the record has only their means."""
    steps: int = 1
    group_waits: Sequence[Mapping[ProcessGroup, float]] = ()
    """Per rank its wait in each of its process groups, mean ms; empty where the record has none by group."""
    synchronised: Sequence[Sequence[int]] = ()
    """Ranks that wait for each other, by index; empty where all do."""
    straggling: bool = False
    """Whether a straggler was known at this step, so that the row does not count for the usual noise."""
    stragglers: frozenset[int] = frozenset()
    """Known stragglers, by index: the other ranks are not compared with them."""
    _sorted: dict[str, list[float]] = field(default_factory=dict, init=False)
    _without_wait: tuple[object, StepRow] | None = field(default=None, init=False)
    _with_stragglers: StepRow | None = field(default=None, init=False)
    _levelled: tuple[Sequence[float], StepRow] | None = field(default=None, init=False)

    @cached_property
    def synced(self) -> bool:
        """Whether every rank measured its wait for the synchronisation, without which lateness is unknown."""
        return all(rank_phases.exposed is not None for rank_phases in self.phases)

    @cached_property
    def own_ms(self) -> float:
        return median_low(self._column("own"))

    @cached_property
    def data_ms(self) -> float:
        return median_low(self._column("data"))

    @cached_property
    def other_share(self) -> float:
        """Median over ranks of the share of their step outside of all other phases."""
        return median_low([each.other / each.step if each.step > 0 else 0.0 for each in self.phases])

    @cached_property
    def wire_ms(self) -> float | None:
        """Bare transfer, ms: in each step the wait of the last rank to arrive, as the others also wait for that rank.

        Where ranks wait in several groups, it is the sum of these over the groups of a rank. None where only means over
        several steps are known: with ranks late in turns, all of these include waits.
        """
        if not self.synced or not self.waits:
            return None
        mean = min(rank_phases.wire for rank_phases in self.phases if rank_phases.wire is not None)
        return min(mean, fmean(map(min, self.waits)), *self._transfers_ms)

    @property
    def _transfers_ms(self) -> Sequence[float]:
        """Mean bare transfer over the groups, with that of DDP's buckets, ms; empty without groups."""
        if not self.group_waits:
            return ()
        totals = [rank_phases.exposed or 0.0 for rank_phases in self.phases]
        ddp = [total - sum(waits.values()) for total, waits in zip(totals, self.group_waits, strict=True)]
        return (least_transfer_ms(self.group_waits) + max(min(ddp), 0.0),)

    @cached_property
    def waits_with_cores(self) -> Sequence[Sequence[float]]:
        """Per step the ranks' waits for the synchronisation as if no rank had waited for a core, ms."""
        if not any(rank_phases.core_wait for rank_phases in self.phases):
            return self.waits
        # Of a rank's waits for a core those in the synchronisation lengthen it, and the others shorten it.
        shifts = [
            rank_phases.core_wait - 2 * ((rank_phases.exposed or 0.0) - (rank_phases.wire or 0.0))
            for rank_phases in self.phases
        ]
        return [[wait + shift for wait, shift in zip(waits, shifts, strict=True)] for waits in self.waits]

    @cached_property
    def step_ms(self) -> float:
        """Median over ranks of the step's duration."""
        return median([rank_phases.step for rank_phases in self.phases])

    @cached_property
    def compute_ms(self) -> float:
        """Median over ranks of forward and backward."""
        return median([rank_phases.forward + rank_phases.backward for rank_phases in self.phases])

    @cached_property
    def core_wait_ms(self) -> float:
        return median(self._column("core_wait"))

    @cached_property
    def own_excess(self) -> list[float]:
        """Per rank, excess of its own work over the other ranks' median, ms."""
        return self._all_excess("own")

    @cached_property
    def core_wait_excess(self) -> list[float]:
        """Per rank, excess of its wait for a core over the other ranks' median, ms."""
        waits = any(rank_phases.core_wait for rank_phases in self.phases)
        return self._all_excess("core_wait") if waits else [0.0] * len(self.phases)

    @cached_property
    def before_forward(self) -> list[float]:
        return [rank_phases.before_forward for rank_phases in self.phases]

    def excess(self, phase: str, index: int) -> float:
        """Return the excess of one rank's phase over the other ranks' median, ms.

        A known straggler is compared with the lower median: of two others one may just have become slow.
        """
        value: float = getattr(self.phases[index], phase)
        ranked = self._column(phase)
        if index in self.stragglers:
            return value - median_low(ranked)
        if len(ranked) == 1:  # its own
            ranked = sorted(map(attrgetter(phase), self.phases))
        return value - median_without(ranked, bisect_left(ranked, value)) if len(ranked) > 1 else 0.0

    def late_ms(self, index: int) -> float:
        """Return a rank's lateness for the synchronisation, ms."""
        waits = self.waits or [tuple(rank_phases.exposed or 0.0 for rank_phases in self.phases)]
        return fmean(late_ms(each, self.synchronised)[index] for each in waits)

    def waiting(self, group: ProcessGroup, index: int, ranks: Sequence[int]) -> dict[int, float]:
        """Return how much longer than one rank each other one of its group waits in that group, ms; by rank.

        ``ranks`` are those of the rows, in their order.
        """
        own = self.group_waits[index].get(group) if self.group_waits else None
        if own is None:
            return {}
        waits = zip(ranks, self.group_waits, strict=True)
        return {rank: each[group] - own for rank, each in waits if group in each and rank != ranks[index]}

    def without_broadcast_wait(self, leader: int, followers: frozenset[int]) -> StepRow:
        """Return the row without the waits of followers for a leader in their forward pass, all by index."""
        key = leader, followers
        if self._without_wait is None or self._without_wait[0] != key:
            first = self.phases[leader]
            all_phases = list(self.phases)
            for index in followers:
                rank_phases = all_phases[index]
                lead = first.before_forward - rank_phases.before_forward
                wait = max(0.0, min(rank_phases.forward - first.forward, lead))
                all_phases[index] = rank_phases._replace(forward=rank_phases.forward - wait, own=rank_phases.own - wait)
            row = replace(self, phases=all_phases)
            self._without_wait = key, row
        return self._without_wait[1]

    def at_one_speed(self, slowness: Sequence[float]) -> StepRow:
        """Return the row as if every rank's device were as fast as the fastest one.

        ``slowness``: by index, how many times as long as that one a rank computes for a sample. What a rank takes
        beyond that stays; a rank that is faster for once is not taken for faster than the fastest.
        """
        if self._levelled is None or self._levelled[0] is not slowness:
            fastest = self.phases[min(range(len(slowness)), key=slowness.__getitem__)]
            all_phases = []
            for rank_phases, ratio in zip(self.phases, slowness, strict=True):
                times = {
                    name: max(min(getattr(fastest, name), own), own / ratio)
                    for name in DEVICE_PHASES
                    if (own := getattr(rank_phases, name)) > 0.0
                }
                saved = sum(getattr(rank_phases, name) - ms for name, ms in times.items())
                all_phases.append(rank_phases._replace(**times, own=rank_phases.own - saved))
            self._levelled = slowness, replace(self, phases=all_phases)
        return self._levelled[1]

    def with_stragglers(self, stragglers: frozenset[int]) -> StepRow:
        """Return the row with these known stragglers, by index."""
        if self._with_stragglers is None or self._with_stragglers.stragglers != stragglers:
            self._with_stragglers = replace(self, stragglers=stragglers)
        return self._with_stragglers

    def _all_excess(self, phase: str) -> list[float]:
        if self.stragglers:
            return [self.excess(phase, index) for index in range(len(self.phases))]
        return excess([getattr(rank_phases, phase) for rank_phases in self.phases])

    def _column(self, phase: str) -> list[float]:
        """Return the ascending values of all ranks but the known stragglers; of all where no other rank is left."""
        ranked = self._sorted.get(phase)
        if ranked is None:
            kept = [each for index, each in enumerate(self.phases) if index not in self.stragglers]
            ranked = self._sorted[phase] = sorted(map(attrgetter(phase), kept or self.phases))
        return ranked


def base_ms(rows: Sequence[StepRow]) -> float:
    """Return the duration of a step without stragglers and waits for a core: median work and bare transfer."""
    return median([row.own_ms for row in rows]) + (wire_ms(rows) or 0.0)


def wire_ms(rows: Sequence[StepRow]) -> float | None:
    """Return the exposed bare transfer (lower quartile over rows); None where it was not measured."""
    waits = [row.wire_ms for row in rows if row.wire_ms is not None]
    return lower_quartile(waits) if waits else None
