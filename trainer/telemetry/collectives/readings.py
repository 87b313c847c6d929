"""Readings of a step's collectives, as the training thread takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from trainer.telemetry.clocks import Instant
from trainer.telemetry.collectives.group_names import NamedGroup


class Call(Struct, eq=False, gc=False):
    """A collective, from its call to the end of the wait for it.

    A struct in C, since a step may have hundreds.
    """

    group: int
    """Index in ``GroupNames.named``."""
    operation: str
    bytes: int
    interval: int
    """Number of phases of the step that were complete at the call."""
    start: Instant
    begun: Instant
    """Where the rank was blocked in it last; at first its start."""
    waited: bool = False
    """Whether a wait for it has ended."""


Wait = tuple[Call, int, Instant, Instant, bool]
"""Time for which the training thread, or on a GPU its stream, was blocked in a call or in waiting for its result: the
call, the number of phases of the step that were complete, start, end, and whether the collective is complete with it.
A plain tuple, for the same reason."""


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

    delays: list[tuple[int, float]] = field(default_factory=list)
    """Run delay within waits where it was read: the number of phases of the step that were complete, seconds."""

    def marks(self) -> Iterator[Instant]:
        for call in self.calls:
            yield call.start
        for _, _, start, end, _ in self.waits:
            yield start
            yield end

    def spent_marks(self) -> Iterator[Instant]:
        """Yield the marks that no later step needs, each once."""
        for call, _, start, end, last in self.waits:
            if end is not start:
                yield end
            if start is not call.start:
                yield start
            if last:
                yield call.start
