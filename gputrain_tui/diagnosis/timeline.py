"""Aligns the steps of all ranks in rows, each step once.

An update reads only new events: its cost depends on the number of ranks, not on the history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, cast

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.row import StepPhases, StepRow
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.process_groups import ProcessGroup
from gputrain_tui.state.step_losses import run_loss
from trainer.contract.record import Step, mean_samples


class StepRange(NamedTuple):
    """Consecutive steps of a rank with the same values in the record."""

    first: int
    last: int
    until: int
    """Last step of the event that reported it."""
    rank_phases: StepPhases | None
    """None where its phases were not measured."""
    loss: float | None
    samples: float | None
    """Of each step; None where they are not known."""
    waits: Sequence[float | None]
    """Its wait for the synchronisation in each step, ms; None where the record has only a mean over several."""
    group_waits: Mapping[ProcessGroup, float]
    """Its wait in each process group, mean ms; empty where the record has none."""


class RankSteps:
    """Steps of one rank that are in no row yet."""

    def __init__(self) -> None:
        self.ranges: deque[StepRange] = deque()
        self.last_reported = 0
        self.events_seen = 0
        self._step_end: tuple[float, float, float] | None = None
        """Phases ``optimizer`` and ``other`` of the last step and their waits for a core, ms: they precede the next
        synchronisation."""

    def append_new(self, view: RankView) -> bool:
        """Append a rank's new events; return False where some were missed or the rank was restarted."""
        new, self.events_seen = view.events - self.events_seen, view.events
        kept = len(view.steps)
        if self.last_reported and new >= kept:
            return False
        for index in range(max(kept - new, 0), kept):
            event = view.steps[index]
            self._append(event, view.groups.waits(event))
        return True

    def drop_through(self, step: int) -> None:
        while self.ranges and self.ranges[0].last <= step:
            self.ranges.popleft()

    def _append(self, event: Step, groups: Mapping[ProcessGroup, float]) -> None:
        first = event.step - event.steps + 1
        if first > self.last_reported + 1:
            self._step_end = None
        loss = event.loss if event.loss is not None and math.isfinite(event.loss) else None
        samples = mean_samples(event)
        waits = event.sync_exposed_ms_each
        if waits is None or len(waits) != event.steps:
            waits = [event.sync_exposed_ms if event.steps == 1 else None] * event.steps
        rank_phases, end_wait = _step_phases(event)
        if rank_phases is None:
            self._step_end = None
            self.ranges.append(StepRange(first, event.step, event.step, None, loss, samples, waits, groups))
        else:
            tail, end = self._step_end, (rank_phases.optimizer, rank_phases.other, end_wait)
            # An unmeasured wait is part of ``other``, which must not count as work of the next step.
            self._step_end = end if rank_phases.exposed is not None else None
            begins = first
            if tail is not None and tail != end:
                optimizer, other, waited = tail
                own = rank_phases.own - rank_phases.optimizer - rank_phases.other + optimizer + other
                before = rank_phases.core_wait_before - end_wait + waited
                start = rank_phases._replace(optimizer=optimizer, other=other, own=own, core_wait_before=before)
                self.ranges.append(StepRange(first, first, event.step, start, loss, samples, waits[:1], groups))
                begins = first + 1
            if begins <= event.step:
                rest = waits[begins - first :]
                self.ranges.append(StepRange(begins, event.step, event.step, rank_phases, loss, samples, rest, groups))
        self.last_reported = event.step


class Timeline:
    """The newest steps that every rank has reported."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.rows: deque[StepRow] = deque(maxlen=limit.HISTORY)
        """By ascending step; steps without the phases of every rank are left out."""
        self.losses: deque[float] = deque(maxlen=limit.HISTORY)
        """Mean over the ranks at each step that has one, nats."""
        self._rank_steps: list[RankSteps] = []
        self._last_row = 0
        """Last step that is in a row, or was skipped."""
        self._last_warm_up = 0
        self._synchronised: Sequence[Sequence[int]] = ()
        """Ranks that wait for each other, by index; empty where all do."""

    def follow(self, state: RunState) -> None:
        """Add the rows of new events; start over after the restart of a rank."""
        views = [state.ranks[rank] for rank in sorted(state.ranks)]
        ranks = tuple(view.rank for view in views)
        if not views or any(not view.steps for view in views):
            self._reset(())
            return
        known = ranks == self.ranks and all(
            steps.append_new(view) for steps, view in zip(self._rank_steps, views, strict=True)
        )
        if not known:
            self._reset(ranks)
            for steps, view in zip(self._rank_steps, views, strict=True):
                steps.append_new(view)
            self._last_warm_up = max(view.started_at for view in views) + limit.WARM_UP_STEPS
            self._last_row = max(steps.ranges[0].first for steps in self._rank_steps) - 1
        sets, indices = state.synchronised(), {rank: index for index, rank in enumerate(ranks)}
        self._synchronised = [[indices[rank] for rank in sorted(of)] for of in sets] if len(sets) > 1 else ()
        self._start_at_newest_shares(state)
        self._add_rows()

    def _start_at_newest_shares(self, state: RunState) -> None:
        """Forget the rows before the newest change of the ranks' shares: their work was another one."""
        change = state.shares.newest
        if change is not None and change.step - 1 > self._last_warm_up:
            self._last_warm_up = change.step - 1
            kept = [row for row in self.rows if row.step >= change.step]
            self.rows.clear()
            self.rows.extend(kept)

    def last(self, count: int) -> list[StepRow]:
        return list(islice(self.rows, max(len(self.rows) - count, 0), None))

    def _reset(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rows.clear()
        self.losses.clear()
        self._rank_steps = [RankSteps() for _ in ranks]

    def _add_rows(self) -> None:
        """Add rows for the steps that every rank has reported.

        Where events cover several steps, so does a row: one for each event of the rank with the longest events, so that
        no two rows repeat the same measurement.
        """
        last_reported = min(steps.last_reported for steps in self._rank_steps)
        while self._last_row < last_reported:
            for steps in self._rank_steps:
                steps.drop_through(self._last_row)
            first = self._last_row + 1
            begins = max(steps.ranges[0].first for steps in self._rank_steps)
            if begins > first:  # a rank's record has a gap
                self._last_row = begins - 1
                continue
            last = max(steps.ranges[0].until for steps in self._rank_steps)
            if last > last_reported:
                return
            if first <= self._last_warm_up < last:  # the warm-up ends within
                last = self._last_warm_up
            self._last_row = last
            self._add(first, last, [list(_within(steps, first, last)) for steps in self._rank_steps])

    def _add(self, first: int, last: int, parts: Sequence[Sequence[tuple[int, StepRange]]]) -> None:
        """Add the row of some steps, from the ranges of each rank."""
        loss = run_loss(map(_mean_loss, parts))
        if loss is not None:
            self.losses.append(loss)
        measured = [phases for phases in map(_mean_phases, parts) if phases is not None]
        if last > self._last_warm_up and len(measured) == len(parts):
            each_rank = [_waits(each, first, last) for each in parts]
            if any(len(waits) != last - first + 1 for waits in each_rank):
                return  # a rank's record has a gap within these steps
            waits = [cast(tuple[float, ...], each) for each in zip(*each_rank, strict=True) if None not in each]
            groups = [_mean_group_waits(each) for each in parts]
            group_waits = groups if any(groups) else ()
            self.rows.append(StepRow(last, measured, waits, last - first + 1, group_waits, self._synchronised))


def _within(steps: RankSteps, first: int, last: int) -> Iterator[tuple[int, StepRange]]:
    """Yield each range that overlaps the steps, with the number of common steps."""
    for step_range in steps.ranges:
        if step_range.first > last:
            return
        yield min(step_range.last, last) - max(step_range.first, first) + 1, step_range


def _mean_phases(phases: Sequence[tuple[int, StepRange]]) -> StepPhases | None:
    """Return the mean of a rank's phases over some steps; None if the phases of a step were not measured."""
    if len(phases) == 1:
        return phases[0][1].rank_phases
    all_phases = [step_range.rank_phases for _, step_range in phases if step_range.rank_phases is not None]
    if len(all_phases) < len(phases):
        return None
    weights = [steps for steps, _ in phases]
    total = sum(weights)
    columns = zip(*all_phases, strict=True)
    return StepPhases._make(
        None if None in column else sum(value * steps for value, steps in zip(column, weights, strict=True)) / total
        for column in columns
    )


def _mean_group_waits(phases: Sequence[tuple[int, StepRange]]) -> Mapping[ProcessGroup, float]:
    """Return the mean of a rank's waits in each group over some steps."""
    if len(phases) == 1:
        return phases[0][1].group_waits
    total = sum(steps for steps, _ in phases)
    means: dict[ProcessGroup, float] = {}
    for steps, step_range in phases:
        for group, wait in step_range.group_waits.items():
            means[group] = means.get(group, 0.0) + wait * steps / total
    return means


def _waits(parts: Sequence[tuple[int, StepRange]], first: int, last: int) -> list[float | None]:
    return [
        wait
        for _, part in parts
        for wait in part.waits[max(first - part.first, 0) : min(last, part.last) - part.first + 1]
    ]


def _mean_loss(phases: Sequence[tuple[int, StepRange]]) -> tuple[float | None, float | None]:
    """Return the mean of a rank's losses over some steps, and its samples in the first of them."""
    known = [(steps, step_range.loss) for steps, step_range in phases if step_range.loss is not None]
    samples = phases[0][1].samples if phases else None
    return sum(steps * loss for steps, loss in known) / sum(steps for steps, _ in known) if known else None, samples


def _step_phases(event: Step) -> tuple[StepPhases | None, float]:
    """Return the phases of an event, with the end of the same step, and the waits for a core at that end, ms.

    None where its phases were not measured. Where only its collectives were, all of its own work is in ``other``.
    """
    step_ms, forward_ms, backward_ms = event.step_ms, event.forward_ms, event.backward_ms
    if event.groups and event.sync_exposed_ms is not None:  # measured by themselves, not as the rest of a phase
        forward_ms, backward_ms = forward_ms or 0.0, backward_ms or 0.0
    if step_ms is None or forward_ms is None:
        return None, 0.0
    data, h2d = event.data_ms or 0.0, event.h2d_ms or 0.0
    backward, optimizer = backward_ms or 0.0, event.optimizer_ms or 0.0
    # Without the exposed synchronisation the backward pass is not known either: both are in ``other``.
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
    samples = mean_samples(event)
    tokens = None if event.tokens is None else event.tokens / event.steps
    return StepPhases(
        data, h2d, forward, backward, optimizer, other, own, core_wait, core_wait_before, gc, exposed, wire, step_ms,
        samples, tokens,
    ), end_wait  # fmt: skip
