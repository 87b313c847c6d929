"""Readings of a step's collectives, as the training thread takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainer.telemetry.clocks import Mark
from trainer.telemetry.collectives.group_names import NamedGroup


class Call:
    """A collective, from its call to the end of the wait for it."""

    __slots__ = ("begun", "bytes", "group", "interval", "operation", "start", "waited")

    def __init__(self, group: int, operation: str, nbytes: int, interval: int, start: Mark) -> None:
        self.group = group
        """Index in ``GroupNames.named``."""
        self.operation = operation
        self.bytes = nbytes
        self.interval = interval
        """Number of phases of the step that were complete at the call."""
        self.start = self.begun = start
        """At the call; and where the rank was blocked in it last."""
        self.waited = False
        """Whether a wait for it has ended."""


Wait = tuple[Call, int, Mark, Mark, bool]
"""Time for which the training thread, or on a GPU its stream, was blocked in a call or in waiting for its result: the
call, the number of phases of the step that were complete, start, end, and whether the collective is complete with it.
A plain tuple, since a step may have hundreds."""


@dataclass(slots=True)
class StepCollectives:
    """Collectives of a step."""

    groups: Sequence[NamedGroup]
    """Those of ``Call.group``; grows."""
    detailed: bool
    """Whether single calls are recorded."""
    calls: list[Call] = field(default_factory=list)
    """Made in the step."""
    waits: list[Wait] = field(default_factory=list)
    """In the step, also for calls of earlier ones."""

    def marks(self) -> Iterator[Mark]:
        for call in self.calls:
            yield call.start
        for _, _, start, end, _ in self.waits:
            yield start
            yield end

    def spent_marks(self) -> Iterator[Mark]:
        """Yield the marks that no later step needs, each once."""
        for call, _, start, end, last in self.waits:
            if end is not start:
                yield end
            if start is not call.start:
                yield start
            if last:
                yield call.start
