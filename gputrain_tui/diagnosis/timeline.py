"""Follows a run's steps and lays those that every rank has reported side by side, each of them once.

A look takes up what is new since the last one, so that its cost grows with the ranks and not with the history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gputrain_tui.diagnosis.row import Cycle, CycleRow
from gputrain_tui.state import RankView, RunState
from trainer.contract.record import Step

HISTORY = 128
"""Step events per rank that a state must keep to be followed, and rows that are kept here."""
WARM_UP = 5
"""First steps of a start that are passed over: caches, allocators and DDP's buckets are still being arranged."""


class Stretch(NamedTuple):
    """Consecutive steps of a rank of which the record tells the same."""

    first: int
    last: int
    until: int
    """Last step of the event that told it."""
    cycle: Cycle | None
    """None where its phases were not measured."""
    loss: float | None


class Lane:
    """One rank's steps that are in no row yet."""

    def __init__(self) -> None:
        self.stretches: deque[Stretch] = deque()
        self.reach = 0
        """Last step that was reported."""
        self.taken = 0
        """Step events taken up, of all that the rank ever reported."""
        self._tail: tuple[float, float, float] | None = None
        """Of the last step, optimizer, other and their waits for a core: what belongs to the next synchronisation."""

    def take_up(self, view: RankView) -> bool:
        """Take up a rank's new events; False where some were missed or the rank began anew."""
        new, self.taken = view.events - self.taken, view.events
        kept = len(view.steps)
        if self.reach and new >= kept:
            return False
        for index in range(max(kept - new, 0), kept):
            self._append(view.steps[index])
        return True

    def drop_until(self, step: int) -> None:
        """Forget the steps until this one, itself included."""
        while self.stretches and self.stretches[0].last <= step:
            self.stretches.popleft()

    def _append(self, event: Step) -> None:
        first = event.step - event.steps + 1
        if first > self.reach + 1:
            self._tail = None
        loss = event.loss if event.loss is not None and math.isfinite(event.loss) else None
        cycle, end_wait = _cycle(event)
        if cycle is None:
            self._tail = None
            self.stretches.append(Stretch(first, event.step, event.step, None, loss))
        else:
            tail, end = self._tail, (cycle.optimizer, cycle.other, end_wait)
            # A wait that was not measured lies in the rest of its step, and must not count as work of the next.
            self._tail = end if cycle.exposed is not None else None
            begins = first
            if tail is not None and tail != end:
                optimizer, other, waited = tail
                own = cycle.own - cycle.optimizer - cycle.other + optimizer + other
                before = cycle.core_wait_before - end_wait + waited
                start = cycle._replace(optimizer=optimizer, other=other, own=own, core_wait_before=before)
                self.stretches.append(Stretch(first, first, event.step, start, loss))
                begins = first + 1
            if begins <= event.step:
                self.stretches.append(Stretch(begins, event.step, event.step, cycle, loss))
        self.reach = event.step


class Timeline:
    """The newest steps that every rank has reported."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.rows: deque[CycleRow] = deque(maxlen=HISTORY)
        """Ascending; a step of which a rank did not measure the phases has none."""
        self.losses: deque[float] = deque(maxlen=HISTORY)
        """Mean over the ranks at each step that has one, nats."""
        self._lanes: list[Lane] = []
        self._done = 0
        """Last step that is in a row, or passed over."""
        self._warm = 0
        """Last step of the warm-up."""

    def follow(self, state: RunState) -> None:
        """Take up what is new; nothing is left of what was before a rank began anew."""
        views = [state.ranks[rank] for rank in sorted(state.ranks)]
        ranks = tuple(view.rank for view in views)
        if not views or any(not view.steps for view in views):
            self._begin(())
            return
        known = ranks == self.ranks and all(lane.take_up(view) for lane, view in zip(self._lanes, views, strict=True))
        if not known:
            self._begin(ranks)
            for lane, view in zip(self._lanes, views, strict=True):
                lane.take_up(view)
            self._warm = max(view.started_at for view in views) + WARM_UP
            self._done = max(lane.stretches[0].first for lane in self._lanes) - 1
        self._lay_out()

    def last(self, count: int) -> list[CycleRow]:
        """Return the newest so many rows."""
        return list(islice(self.rows, max(len(self.rows) - count, 0), None))

    def _begin(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rows.clear()
        self.losses.clear()
        self._lanes = [Lane() for _ in ranks]

    def _lay_out(self) -> None:
        """Make rows of all that every rank has reported.

        Where an event covers several steps, so does a row: one for each event of the rank that tells least often, so
        that no two rows say the same.
        """
        reach = min(lane.reach for lane in self._lanes)
        while self._done < reach:
            for lane in self._lanes:
                lane.drop_until(self._done)
            first = self._done + 1
            begins = max(lane.stretches[0].first for lane in self._lanes)
            if begins > first:  # a rank's record has a gap
                self._done = begins - 1
                continue
            last = max(lane.stretches[0].until for lane in self._lanes)
            if last > reach:
                return
            if first <= self._warm < last:  # the warm-up ends within
                last = self._warm
            self._done = last
            if first == last:
                heads = [lane.stretches[0] for lane in self._lanes]
                self._add(last, 1, [head.cycle for head in heads], [head.loss for head in heads])
            else:
                phases = [list(_within(lane, first, last)) for lane in self._lanes]
                cycles = [_mean_cycle(each) for each in phases]
                self._add(last, last - first + 1, cycles, [_mean_loss(each) for each in phases])

    def _add(self, step: int, steps: int, cycles: Sequence[Cycle | None], losses: Sequence[float | None]) -> None:
        told = [loss for loss in losses if loss is not None]
        if told:
            self.losses.append(sum(told) / len(told))
        measured = [cycle for cycle in cycles if cycle is not None]
        if step > self._warm and len(measured) == len(cycles):
            self.rows.append(CycleRow(step, measured, steps))


def _within(lane: Lane, first: int, last: int) -> Iterator[tuple[int, Stretch]]:
    """Yield how many steps of each stretch lie within some steps."""
    for stretch in lane.stretches:
        if stretch.first > last:
            return
        yield min(stretch.last, last) - max(stretch.first, first) + 1, stretch


def _mean_cycle(phases: Sequence[tuple[int, Stretch]]) -> Cycle | None:
    """Return the mean over some steps, None where one of them was not measured."""
    if len(phases) == 1:
        return phases[0][1].cycle
    cycles = [stretch.cycle for _, stretch in phases if stretch.cycle is not None]
    if len(cycles) < len(phases):
        return None
    weights = [steps for steps, _ in phases]
    total = sum(weights)
    columns = zip(*cycles, strict=True)
    return Cycle._make(
        None if None in column else sum(value * steps for value, steps in zip(column, weights, strict=True)) / total
        for column in columns
    )


def _mean_loss(phases: Sequence[tuple[int, Stretch]]) -> float | None:
    told = [(steps, stretch.loss) for steps, stretch in phases if stretch.loss is not None]
    return sum(steps * loss for steps, loss in told) / sum(steps for steps, _ in told) if told else None


def _cycle(event: Step) -> tuple[Cycle | None, float]:
    """Return what an event tells of a step, with the end of that very step, and the waits for a core at that end, ms.

    None where its phases were not measured.
    """
    step_ms, forward_ms, backward_ms = event.step_ms, event.forward_ms, event.backward_ms
    if step_ms is None or forward_ms is None:
        return None, 0.0
    data, h2d = event.data_ms or 0.0, event.h2d_ms or 0.0
    backward, optimizer = backward_ms or 0.0, event.optimizer_ms or 0.0
    # Where the exposed synchronisation is not known, neither is the backward pass without it: both are in the rest.
    exposed = event.sync_exposed_ms if backward_ms is not None else None
    forward, wire = forward_ms, exposed
    core_wait = core_wait_before = end_wait = 0.0
    other = max(0.0, step_ms - data - h2d - forward - backward - optimizer - (exposed or 0.0))
    if event.core_wait_ms:
        waits = event.core_wait_ms
        core_wait = sum(waits.values())
        end_wait = waits.get("optimizer", 0.0) + waits.get("other", 0.0)
        core_wait_before = waits.get("data", 0.0) + waits.get("h2d", 0.0) + end_wait
        data = max(0.0, data - waits.get("data", 0.0))
        h2d = max(0.0, h2d - waits.get("h2d", 0.0))
        forward = max(0.0, forward - waits.get("forward", 0.0))
        backward = max(0.0, backward - waits.get("backward", 0.0))
        optimizer = max(0.0, optimizer - waits.get("optimizer", 0.0))
        other = max(0.0, other - waits.get("other", 0.0))
        if exposed is not None:
            wire = max(0.0, exposed - waits.get("sync", 0.0))
    own = data + h2d + forward + backward + optimizer + other
    gc = event.gc_ms or 0.0
    return Cycle(
        data, h2d, forward, backward, optimizer, other, own, core_wait, core_wait_before, gc, exposed, wire, step_ms
    ), end_wait
