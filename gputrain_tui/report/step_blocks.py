"""A run's steps in a few equal blocks, from which differences and their intervals are taken. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Any

from msgspec.structs import replace

from gputrain_tui.state.totals import PHASES, ZERO_TOTALS, Totals
from trainer.contract.record import Step, samples_of_each

MIN_BLOCKS = 64
"""Blocks of a run that has as many steps; at twice as many, neighbours are joined."""
MIN_VALUES = 16
"""Blocks that an interval needs: of fewer it is too narrow."""
RESAMPLES = 1000
"""Of the bootstrap: its quantiles of 2.5 and 97.5 % are then known to a few thousandths."""
Interval = tuple[float, float]


class StepBlocks:
    """Sums over the steps of each rank in blocks of equally many steps, in bounded memory."""

    def __init__(self) -> None:
        self.length = 1
        """Steps of a block."""
        self._blocks: dict[int, dict[int, Totals]] = {}
        """By number of the block, by rank."""
        self.first_step = 1
        """First step of all events: of a resumed run the one after its checkpoint's."""
        self.last_step = 0
        """Last step of all events; 0 before the first."""

    def apply(self, event: Step) -> None:
        """Add a step event; one that covers steps of several blocks is divided among them.

        Its losses go with their steps, all else in proportion.

        Steps that a restart repeats count twice, as their time was spent twice.
        """
        begun = event.step - event.steps + 1
        self.first_step = min(self.first_step, begun) if self.last_step else begun
        self.last_step = max(self.last_step, event.step)
        while event.steps > MIN_BLOCKS * self.length:
            self._join()
        first, last = (event.step - event.steps) // self.length, (event.step - 1) // self.length
        if first == last:
            sums = self._blocks.setdefault(last, {})
            sums[event.rank] = sums.get(event.rank, ZERO_TOTALS).plus(event)
        else:
            whole = ZERO_TOTALS.plus(event)
            for number in range(first, last + 1):
                begin = max(number * self.length - (event.step - event.steps), 0)
                end = min((number + 1) * self.length - (event.step - event.steps), event.steps)
                share = (end - begin) / event.steps
                part = Totals._make(value * share for value in whole)
                if event.losses is not None and len(event.losses) == event.steps:
                    samples = samples_of_each(event)
                    of_steps = None if samples is None else samples[begin:end]
                    part = _with_losses(part, event.losses[begin:end], of_steps)
                sums = self._blocks.setdefault(number, {})
                sums[event.rank] = _added(sums[event.rank], part) if event.rank in sums else part
        while len(self._blocks) >= 2 * MIN_BLOCKS:
            self._join()

    def _join(self) -> None:
        joined: dict[int, dict[int, Totals]] = {}
        for number, sums in self._blocks.items():
            into = joined.setdefault(number // 2, {})
            for rank, totals in sums.items():
                into[rank] = _added(into[rank], totals) if rank in into else totals
        self.length *= 2
        self._blocks = joined

    def amount(self, of: Callable[[Sequence[Totals]], float]) -> float:
        """Return the sum of an amount over all blocks."""
        return sum(of(list(sums.values())) for sums in self._blocks.values())

    def step_after(self, amount: float, of: Callable[[Sequence[Totals]], float]) -> int:
        """Return the step at which the blocks up to it have an amount, such as of samples, or else the last step."""
        for first, last, sums in self.numbered():
            here = of(sums)
            if here >= amount > 0:
                return first + round((last - first) * amount / here)
            amount -= here
        return self.last_step

    def numbered(self) -> Iterator[tuple[int, int, Sequence[Totals]]]:
        """Yield first and last step of each block with the sums of its ranks, in order."""
        for number in sorted(self._blocks):
            last = min((number + 1) * self.length, self.last_step)
            yield number * self.length + 1, last, list(self._blocks[number].values())

    def after_warm_up(self) -> list[Sequence[Totals]]:
        """Return the sums of the ranks in each block, in order, without the first tenth of the blocks, at least one.

        First steps allocate memory, read files and compile.
        """
        numbers = sorted(self._blocks)
        skipped = max(1, len(numbers) // 10) if len(numbers) > 2 else 0
        return [list(self._blocks[number].values()) for number in numbers[skipped:]]

    def has(self, step: int) -> bool:
        """Return whether a step is one of the run's."""
        return self.first_step <= step <= self.last_step

    def around(
        self, step: int, *, length: int = 1, first: int | None = None, last: int | None = None
    ) -> list[Sequence[Totals]]:
        """Return the blocks within a twentieth of a step, or the one that holds it; none where the run lacks the step.

        Two runs are averaged over the same steps where these are the same: ``length``, least steps of a block, and
        ``first`` and ``last``, between which a block lies, the nearest one if none of them is so near.
        """
        if not self.has(step):
            return []
        reach = max(step // 20, 1)
        distances = [
            (max(begin - step - reach, step - reach - end, 0), sums)
            for begin, end, sums in self._in_blocks_of(length)
            if (first is None or first <= begin) and (last is None or end <= last)
        ]
        nearest = min((distance for distance, _ in distances), default=0)
        return [sums for distance, sums in distances if distance == nearest]

    def _in_blocks_of(self, length: int) -> Iterator[tuple[int, int, Sequence[Totals]]]:
        """Yield first and last step of each block of at least this length, the last ones whole, with their sums."""
        coarse = StepBlocks()
        coarse.length, coarse._blocks = self.length, self._blocks
        while coarse.length < length:
            coarse._join()
        for number in sorted(coarse._blocks):
            end = (number + 1) * coarse.length
            yield number * coarse.length + 1, end, list(coarse._blocks[number].values())


def _with_losses(part: Totals, losses: Sequence[float | None], samples: Sequence[int | None] | None) -> Totals:
    """Return the sums of some steps of an event with the losses of these steps, in place of their share of its mean.

    ``samples``: of these steps, where they differ.
    """
    each = samples if samples is not None else [part.samples / len(losses) if part.loss_samples else 0.0] * len(losses)
    known = [(loss, count) for loss, count in zip(losses, each, strict=True) if loss is not None]
    sums: dict[str, Any] = {
        "loss": sum(loss for loss, _ in known),
        "loss_steps": len(known),
        "sample_loss": sum(loss * (count or 0) for loss, count in known),
        "loss_samples": sum(count or 0 for _, count in known),
    }
    return part._replace(**sums)


def _added(one: Totals, other: Totals) -> Totals:
    """Return the sums over both; phases of steps before the first synchronisation are dropped, as in ``plus``."""
    if other.synced_steps and not one.synced_steps:
        one = one._replace(whole_ms=0.0, whole_steps=0, **{f"{phase}_ms": 0.0 for phase in PHASES})  # type: ignore[arg-type]
    return Totals._make(a + b for a, b in zip(one, other, strict=True))


def without_core_waits(event: Step) -> Step:
    """Return a step without the time in which the rank waited for a core that others used."""
    waits = event.core_wait_ms
    if not waits or event.step_ms is None:
        return event
    less: dict[str, float] = {"step_ms": max(event.step_ms - sum(waits.values()), 0.0)}
    for phase, wait_ms in waits.items():
        field = "sync_exposed_ms" if phase == "sync" else f"{phase}_ms"
        if (ms := getattr(event, field, None)) is not None:
            less[field] = max(ms - wait_ms, 0.0)
    return replace(event, **less)


Measure = Callable[[Sequence[Totals]], float | None]
"""Figure of one block from the sums of its ranks."""
BlockSum = tuple[float, float]
"""Sum of a figure in one block, and what it is summed over: the milliseconds and the number of its steps, or what was
done in them and their time. So a slow block counts as long as it takes, and one of few steps as few."""


def block_sums(
    blocks: Sequence[Sequence[Totals]], measure: Measure, over: Callable[[Sequence[Totals]], float]
) -> list[BlockSum]:
    """Return the sums of each block that has the figure; ``over``: what the figure is a mean over."""
    return [
        (value * count, count)
        for block in blocks
        if (value := measure(block)) is not None and (count := over(block)) > 0
    ]


def mean(sums: Sequence[BlockSum]) -> float:
    """Return the mean over one or more blocks."""
    return sum(amount for amount, _ in sums) / sum(count for _, count in sums)


def difference_interval(before: Sequence[BlockSum], after: Sequence[BlockSum], *, relative: bool) -> Interval | None:
    """Return the 95 % interval of the difference of two means over blocks, ``after`` less ``before``.

    None with fewer than ``MIN_VALUES`` blocks. Moving blocks of neighbours are drawn with replacement, as the values of
    neighbours depend on each other (Künsch, Annals of Statistics 17, 1989); they have the third root of the number of
    values, and their places wrap around (Politis & Romano 1992). The generator has a fixed seed: the same records give
    the same interval.
    """
    if min(len(before), len(after)) < MIN_VALUES:
        return None
    random = Random(0)
    draw_before, draw_after = _mean_of_drawn(before, random), _mean_of_drawn(after, random)
    drawn = []
    for _ in range(RESAMPLES):
        one, other = draw_before(), draw_after()
        if relative and not one:
            return None
        drawn.append(other / one - 1 if relative else other - one)
    drawn.sort()
    return drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]


def _mean_of_drawn(values: Sequence[BlockSum], random: Random) -> Callable[[], float]:
    """Return a function that draws as many values as there are, in blocks of neighbours, and returns their mean."""
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    lengths = [length] * (count // length) + ([count % length] if count % length else [])
    # Differences of two are sums of blocks.
    amounts, counts = (
        list(accumulate([*column, *column[:length]], initial=0.0)) for column in zip(*values, strict=True)
    )

    def draw() -> float:
        amount = over = 0.0
        for each in lengths:
            start = int(random.random() * count)
            amount += amounts[start + each] - amounts[start]
            over += counts[start + each] - counts[start]
        return amount / over

    return draw
