"""How far the record of a run goes, and what it lacks, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.runs import Run

GOING = ("queued", "starting", "running", "stopping")
"""States of a run in which its last lines may be half written at the moment."""
MAX_LINES = 8
"""About ranks; a run of a thousand ranks would scroll all else away."""
MAX_GAPS = 3
"""Of each rank that are named; the missing steps are all counted."""


@dataclass(kw_only=True)
class RankExtent:
    """How far the record of a rank goes, and what it lacks."""

    rank: int
    steps: int = 0
    first: int | None = None
    """First step, of the first attempt."""
    last: int | None = None
    """Last step, of the last attempt."""
    attempts: int = 1
    missing: int = 0
    """Steps that are not in the record although later ones are."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """The first few of these gaps: first and last step that is missing."""
    unreadable_lines: int = 0
    """Lines that are no events of this version, such as those that a crash has torn."""
    lost_events: int = 0
    """That the disk did not take."""
    only_means: int = 0
    """Steps of which the record has no single values at all."""
    is_cut: bool = False
    """Whether the file holds bytes without end that are no lines, and was read no further."""

    def missed(self, first: int, last: int) -> None:
        """Note steps that are missing."""
        self.missing += last - first + 1
        if len(self.gaps) < MAX_GAPS:
            self.gaps.append((first, last))


def summary(extents: Sequence[RankExtent]) -> str:
    """Return what was exported: ``600 steps of 2 ranks, 1 to 300``."""
    whole = [extent for extent in extents if extent.steps]
    first = min(extent.first or 0 for extent in whole)
    last = max(extent.last or 0 for extent in whole)
    return f"{_count(sum(extent.steps for extent in whole), 'step')} of {_count(len(whole), 'rank')}, {first} to {last}"


def shortcomings(run: Run, extents: Sequence[RankExtent] = ()) -> list[str]:
    """Return a line about a run that is not finished, and lines about what the record of its ranks lacks."""
    newest = last_step(run.dir)
    last = max((extent.last or 0 for extent in extents), default=0 if newest is None else newest.step)
    lines = []
    if run.state in GOING:
        lines.append(f"{run.id} is still {run.state}: its record goes to step {last} so far")
    elif run.state == "lost":
        why = "its supervisor was killed" if run.status.archived is None else "it was archived while it ran"
        lines.append(f"{run.id} has no end, {why}: its record goes to step {last}")
    elif run.state != "finished":
        how = "was stopped" if run.state == "stopped" else "failed"
        lines.append(f"{run.id} {how}: its record goes to step {last}")
    about = [line for extent in extents for line in _of_rank(extent, last if run.state not in GOING else extent.last)]
    more = len(about) - MAX_LINES
    return [*lines, *about[:MAX_LINES], *([f"{more} more such lines about other ranks"] if more > 0 else [])]


def _of_rank(extent: RankExtent, last: int | None) -> Iterator[str]:
    name = f"rank {extent.rank}"
    if not extent.steps:
        yield f"{name} has recorded no step"
    elif extent.last != last:
        yield f"{name} has recorded steps to {extent.last} alone"
    if extent.missing:
        named = ", ".join(f"{first} to {end}" if end > first else str(first) for first, end in extent.gaps)
        more = ", …" if len(extent.gaps) == MAX_GAPS else ""
        yield f"{name}: {_count(extent.missing, 'step')} between others are not in the record: {named}{more}"
    if extent.unreadable_lines:
        yield f"{name}: {_count(extent.unreadable_lines, 'line')} of its record cannot be read, and is left out"
    if extent.is_cut:
        yield f"{name}: its record is damaged beyond reading after that"
    if extent.lost_events:
        yield f"{name}: the disk did not take {_count(extent.lost_events, 'event')}"
    if extent.only_means:
        yield f"{name}: of {_count(extent.only_means, 'step')} the record has means alone, which are repeated"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
