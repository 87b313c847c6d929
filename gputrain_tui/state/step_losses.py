"""The loss of one step, also of an event that covers several: the run's step and loss in every view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.contract.record import Step


def loss_at(events: Iterable[Step], step: int) -> float | None:
    """Return a rank's loss at a step, nats, from its events; None where none of them has it.

    Of an event without single values (a downsampled block) it is the mean over its steps.
    """
    for event in events:
        if event.step - event.steps < step <= event.step:
            singles = event.losses
            if singles is None or len(singles) != event.steps:
                return event.loss
            return singles[step - event.step - 1]
    return None


def newest_loss(ranks: Iterable[Sequence[Step]]) -> tuple[int, float | None]:
    """Return the newest step that all ranks with events have done, and the mean of their losses at that step, nats."""
    reporting = [events for events in ranks if events]
    step = min((max(event.step for event in events) for events in reporting), default=0)
    return step, mean_loss(loss_at(events, step) for events in reporting)


def mean_loss(losses: Iterable[float | None]) -> float | None:
    """Return the mean of the ranks' losses at one step; None where none was measured."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None
