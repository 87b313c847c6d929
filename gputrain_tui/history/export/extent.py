"""Extent of the record of a run and the gaps in it, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gputrain_tui.history.export.steps import GOING, MAX_GAPS, RankExtent
from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run
from gputrain_tui.state.counted_anew import counts_anew
from gputrain_tui.tables import counted

MAX_LINES = 8
"""Maximum number of lines about ranks; a thousand of them would scroll everything else away."""


def summary(extents: Sequence[RankExtent]) -> str:
    """Return a line about the exported steps: ``600 steps of 2 ranks, 1 to 300``, with what is repeated in them."""
    whole = [extent for extent in extents if extent.steps]
    first = min(extent.first or 0 for extent in whole)
    last = max(extent.last or 0 for extent in whole)
    text = (
        f"{counted(sum(extent.steps for extent in whole), 'step')} of {counted(len(whole), 'rank')}, {first} to {last}"
    )
    if counts_anew((each.beginnings for each in whole), is_task=any(each.is_task for each in whole)):
        return f"{text} in its last start; each start of the script counts from 1 and is an attempt of its own"
    attempts = max(extent.attempts for extent in whole)
    return f"{text} in {attempts} attempts, which repeat steps" if attempts > 1 else text


def shortcomings(run: Run, extents: Sequence[RankExtent] = ()) -> list[str]:
    """Return a line about a run that is not finished, and lines about gaps and damage in the records of its ranks."""
    newest = last_step(run.dir)
    last = max((extent.last or 0 for extent in extents), default=0 if newest is None else newest.step)
    lines = []
    if run.state in GOING:
        lines.append(f"{run.id} is still {run.state}: its record goes to step {last} so far")
    elif run.state == "lost":
        why = "its supervisor was killed" if run.status.archived is None else "it was archived while it ran"
        lines.append(f"{run.id} has no end, {why}: its record goes to step {last}")
    elif run.state != "finished":
        outcome = "was stopped" if run.state == "stopped" else "failed"
        lines.append(f"{run.id} {outcome}: its record goes to step {last}")
    goes_on = run.state in GOING
    about = [
        line
        for extent in extents  # the record of a rank that is gone since an earlier attempt ends early
        for line in _of_rank(extent, extent.last if goes_on or extent.rank >= run.status.world_size else last)
    ]
    more = len(about) - MAX_LINES
    return [*lines, *about[:MAX_LINES], *([f"{more} more such lines about other ranks"] if more > 0 else [])]


def _of_rank(extent: RankExtent, last: int | None) -> Iterator[str]:
    name = f"rank {extent.rank}"
    if not extent.steps:
        yield f"{name} has recorded no step"
    elif extent.last != last:
        yield f"{name} has recorded steps only up to {extent.last}"
    if extent.missing:
        named = ", ".join(f"{first} to {end}" if end > first else str(first) for first, end in extent.gaps)
        more = ", …" if len(extent.gaps) == MAX_GAPS else ""
        yield f"{name}: {counted(extent.missing, 'step')} in between are not in the record: {named}{more}"
    if extent.unreadable_lines:
        yield f"{name}: {counted(extent.unreadable_lines, 'unreadable line')} of its record left out"
    if extent.is_cut:
        yield f"{name}: its record cannot be read any further"
    if extent.lost_events:
        yield f"{name}: {counted(extent.lost_events, 'event')} could not be written to disk"
    if extent.only_means:
        yield f"{name}: the record has only means of {counted(extent.only_means, 'step')}, which are repeated"
