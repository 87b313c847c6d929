"""Expansion of a step event that covers several optimizer steps into one event per step."""

from __future__ import annotations

from trainer.contract.record.events import SINGLE_VALUES, Step

MEAN_FIELDS = tuple(
    name for name in Step.__struct_fields__
    if name not in (
        *SINGLE_VALUES, *SINGLE_VALUES.values(), "time", "rank", "step", "epoch", "steps", "samples", "tokens", "lr",
        "bucket_ms", "calls",
    )
)  # fmt: skip
"""Fields that hold a mean, or the value of the last step, if the event covers several steps."""


def samples_of_each(event: Step) -> list[int | None] | None:
    """Return the samples of each covered step; None where the event has only their sum, or is damaged."""
    each = event.samples_each
    return each if each is not None and len(each) == event.steps else None


def mean_samples(event: Step) -> float | None:
    """Return the samples of a covered step, their mean; None where they are not known of all."""
    is_known = event.samples is not None and None not in (event.samples_each or ())
    return event.samples / event.steps if is_known and event.samples is not None else None


def single_steps(event: Step, *, means: bool = False) -> list[Step]:
    """Return one event per covered step, with the values of that step; ``[event]`` if it has no values per step.

    Tokens are divided evenly, and samples where the event has only their sum. Fields of which the event has only a mean
    are absent.

    Args:
        event: one or several steps.
        means: repeat such means in each step instead, even if the event has no values per step at all; the times of
            the buckets and the single collectives are then given to the last step.
    """
    count, lengths_ms = event.steps, event.step_ms_each
    if count == 1 or (not means and (lengths_ms is None or len(lengths_ms) != count)):
        return [event]
    each = {name: _step_values(event, name, means) for name in SINGLE_VALUES}
    repeated = {name: getattr(event, name) for name in MEAN_FIELDS} if means else {}
    samples = samples_of_each(event)
    ends = [event.time] * count
    for index in range(count - 1, 0, -1):
        ends[index - 1] = ends[index] - (each["step_ms"][index] or 0.0) / 1e3
    singles = [
        Step(
            time=time,
            rank=event.rank,
            step=event.step - count + 1 + index,
            epoch=event.epoch,
            steps=1,
            samples=_part(event.samples, index, count) if samples is None else samples[index],
            tokens=_part(event.tokens, index, count),
            lr=event.lr,
            loss=loss,
            step_ms=step_ms,
            sync_exposed_ms=waited_ms,
            **repeated,
        )
        for index, (time, loss, step_ms, waited_ms) in enumerate(zip(ends, *each.values(), strict=True))
    ]
    if means:
        singles[-1].bucket_ms, singles[-1].calls = event.bucket_ms, event.calls
    return singles


def _step_values(event: Step, name: str, means: bool) -> list[float | None]:
    values = getattr(event, SINGLE_VALUES[name])
    if values is not None and len(values) == event.steps:
        return list(values)
    return [getattr(event, name) if means else None] * event.steps


def _part(total: int | None, index: int, count: int) -> int | None:
    return None if total is None else total * (index + 1) // count - total * index // count
