"""The last steps of all ranks side by side: what each did between two synchronisations, net of waiting for a core.

All ranks leave a synchronisation at about the same moment. So what makes one late for the next is all that it did
since: the end of the last step (optimizer, logging) and this step's data, forward and backward. On a busy machine
most of the difference between two steps is waiting for a core. The record tells that apart, and so do these rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median, median_low
from typing import NamedTuple

from gputrain_tui.state import RunState
from trainer.record import Step

PARTS = ("data", "h2d", "forward", "backward", "optimizer", "other")
"""What a rank does between two synchronisations; ``other`` is what no part of the step accounts for."""
NEWEST = 8
"""Events of each rank that tell how many steps an event covers by now."""
WARM_UP = 5
"""First steps of a start that are passed over: caches, allocators and DDP's buckets are still being arranged."""


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
    gc: float
    """In Python's garbage collector; lies within the other parts."""
    exposed: float | None
    """Waited for the synchronisation that ends the cycle; None in a world of one rank."""
    wire: float | None
    """The same without the wait for a core at its end."""
    step: float
    """Duration of the whole step, as the clock saw it."""


def cycles(events: Iterable[Step]) -> dict[int, Cycle]:
    """Return a rank's cycles by step number; of an event that covers several steps, each has the mean."""
    found: dict[int, Cycle] = {}
    tail: tuple[int, float, float] | None = None
    for event in events:
        if event.forward_ms is None or event.step_ms is None or (event.backward_ms is None):
            tail = None
            continue
        waits = event.core_wait_ms or {}
        data = _net(event.data_ms, waits.get("data"))
        h2d = _net(event.h2d_ms, waits.get("h2d"))
        forward = _net(event.forward_ms, waits.get("forward"))
        backward = _net(event.backward_ms, waits.get("backward"))
        optimizer = _net(event.optimizer_ms, waits.get("optimizer"))
        exposed = event.sync_exposed_ms
        known = (event.data_ms, event.h2d_ms, event.forward_ms, event.backward_ms, event.optimizer_ms, exposed)
        other = _net(max(0.0, event.step_ms - sum(value or 0.0 for value in known)), waits.get("other"))
        wire = None if exposed is None else _net(exposed, waits.get("sync"))
        core_wait, gc = sum(waits.values()), event.gc_ms or 0.0
        for number in range(event.step - event.steps + 1, event.step + 1):
            # The end of the step before belongs to this step's synchronisation.
            before = tail[1:] if tail is not None and tail[0] == number - 1 else (optimizer, other)
            own = data + h2d + forward + backward + sum(before)
            found[number] = Cycle(
                data, h2d, forward, backward, *before, own, core_wait, gc, exposed, wire, event.step_ms
            )
            tail = (number, optimizer, other)
    return found


def mean(of: Sequence[Cycle]) -> Cycle:
    """Return the mean of some cycles, column by column."""
    columns = zip(*of, strict=True)
    return Cycle._make(None if None in column else sum(column) / len(column) for column in columns)


def _net(milliseconds: float | None, waited: float | None) -> float:
    return max(0.0, (milliseconds or 0.0) - (waited or 0.0))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The newest steps that every rank has reported."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    """Numbers, ascending; one that a rank did not measure is missing. Where steps are so fast that an event covers
    several, the last of as many: a row then is their mean, so that rows are no copies of each other."""
    rows: tuple[tuple[Cycle, ...], ...]
    """Per step, per rank in the order of ``ranks``."""
    _known: dict[str, list[list[float]]] = field(default_factory=dict, compare=False, repr=False)
    """Columns of ``excess`` that were asked for before."""

    @classmethod
    def of(cls, state: RunState) -> Timeline:
        """Take what the state keeps; empty until every rank has reported."""
        views = [state.ranks[rank] for rank in sorted(state.ranks)]
        if not views or any(not view.steps for view in views):
            return cls(ranks=(), steps=(), rows=())
        found = [cycles(view.steps) for view in views]
        first = max((view.started_at for view in views), default=0) + WARM_UP
        common = sorted(set(found[0]).intersection(*found[1:]))
        numbers = tuple(number for number in common if number > first)
        ranks = tuple(view.rank for view in views)
        covered = min(median_low([event.steps for event in islice(reversed(view.steps), NEWEST)]) for view in views)
        if covered == 1:
            rows = tuple(tuple(each[number] for each in found) for number in numbers)
            return cls(ranks=ranks, steps=numbers, rows=rows)
        groups = [numbers[end - covered : end] for end in range(len(numbers), covered - 1, -covered)][::-1]
        rows = tuple(tuple(mean([each[number] for number in group]) for each in found) for group in groups)
        return cls(ranks=ranks, steps=tuple(group[-1] for group in groups), rows=rows)

    def last(self, count: int) -> Timeline:
        """Return the newest so many steps."""
        return Timeline(ranks=self.ranks, steps=self.steps[-count:], rows=self.rows[-count:])

    def excess(self, name: str) -> list[list[float]]:
        """Return per rank, per step, by how much it exceeds the median of the other ranks in a column, ms."""
        if name in self._known:
            return self._known[name]
        index = Cycle._fields.index(name)
        found: list[list[float]] = [[] for _ in self.ranks]
        for row in self.rows:
            values = [cycle[index] or 0.0 for cycle in row]
            for series, value in zip(found, excess(values), strict=True):
                series.append(value)
        self._known[name] = found
        return found

    @property
    def base_ms(self) -> float:
        """A step as it would be with a core for everybody and nobody late: the usual work and the bare transfer."""
        own = median(median_low([cycle.own for cycle in row]) for row in self.rows)
        return own + (self.wire_ms or 0.0)

    @property
    def wire_ms(self) -> float | None:
        """The bare transfer that nothing hides: the last rank to arrive waits for no other (lower quartile)."""
        waits = [
            min(wires)
            for row in self.rows
            if (wires := [cycle.wire for cycle in row if cycle.wire is not None]) and len(wires) == len(row)
        ]
        return quantile(waits, 0.25) if waits else None


def excess(values: Sequence[float]) -> list[float]:
    """Return each value minus the median of the others; 0 for a single one."""
    if len(values) < 2:
        return [0.0] * len(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked = [values[index] for index in order]
    count = len(values) - 1
    found = [0.0] * len(values)
    for place, index in enumerate(order):
        low, high = (count - 1) // 2, count // 2
        others = (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2
        found[index] = values[index] - others
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which about this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation as the median absolute deviation tells it, deaf to outliers."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def jitter(values: Sequence[float]) -> float:
    """Return the standard deviation from one step to the next, deaf to outliers and to a level that shifts."""
    return 1.4826 * median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)
