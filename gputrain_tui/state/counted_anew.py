"""Whether the steps of a script were counted from 1 more than once, so that a number is no step of the run. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.record import Step


def begins_at_1(event: Step) -> bool:
    """Whether the steps that an event covers begin at 1."""
    return event.step == event.steps


def counts_anew(beginnings: Iterable[int], *, is_task: bool) -> bool:
    """Whether a script was started again, which counts its steps from 1 each time.

    ``beginnings``: how often the steps of each rank began at 1; ``is_task``: whether a training plan is recorded, as a
    task's, which goes on from a checkpoint and repeats the steps after it.
    """
    return not is_task and any(count > 1 for count in beginnings)
