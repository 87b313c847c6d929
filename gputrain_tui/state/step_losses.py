"""The loss of one step, also of an event that covers several: the run's step and loss in every view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.contract.record import Step, samples_of_each


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


def samples_at(events: Iterable[Step], step: int) -> float | None:
    """Return a rank's samples at a step, from its events; None where they are not known."""
    event = next((event for event in events if event.step - event.steps < step <= event.step), None)
    if event is None or event.samples is None:
        return None
    singles = samples_of_each(event)
    return event.samples / event.steps if singles is None else singles[step - event.step - 1]


def newest_loss(ranks: Iterable[Sequence[Step]]) -> tuple[int, float | None]:
    """Return the newest step that all ranks with events have done, and the run's loss at that step, nats."""
    reporting = [events for events in ranks if events]
    step = min((max(event.step for event in events) for events in reporting), default=0)
    return step, run_loss((loss_at(events, step), samples_at(events, step)) for events in reporting)


def run_loss(of_ranks: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Return the loss of a run at one step from each rank's loss and samples; None where no loss was measured.

    Ranks count by their samples, as their gradients do: shares of a batch may differ. All count alike where the samples
    of one are not known.
    """
    known = [(loss, samples) for loss, samples in of_ranks if loss is not None]
    if not known:
        return None
    weights = [samples or 0.0 for _, samples in known]
    if not sum(weights) or any(samples is None for _, samples in known):
        weights = [1.0] * len(known)
    return sum(loss * weight for (loss, _), weight in zip(known, weights, strict=True) if weight) / sum(weights)
