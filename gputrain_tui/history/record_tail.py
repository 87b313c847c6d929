"""Reads the newest steps and evaluations of a run from the ends of its event files."""

from __future__ import annotations

from gputrain_tui.state.step_losses import newest_loss
from trainer.contract.record import Finding, RunDir, Step, Validation, decode_events
from trainer.contract.record.regular_file import read_tail


def last_steps(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> list[Step]:
    """Return the newest steps that a rank recorded, read from the end of its file, in order."""
    try:
        data = read_tail(run.rank_events(rank), tail_bytes)
    except OSError:
        return []
    return [event for event in decode_events(data[: data.rfind(b"\n") + 1]) if isinstance(event, Step)]


def last_step(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> Step | None:
    """Return the newest step that a rank recorded."""
    steps = last_steps(run, rank, tail_bytes=tail_bytes)
    return steps[-1] if steps else None


def newest_loss_of(run: RunDir, world_size: int) -> tuple[int | None, float | None]:
    """Return the newest step that all ranks recorded, None for none, and the mean of their losses at that step."""
    step, loss = newest_loss(list(reversed(last_steps(run, rank)[-2:])) for rank in range(world_size))
    return step or None, loss


def last_test(run: RunDir, *, tail_bytes: int = 16_384) -> Validation | None:
    """Return the newest evaluation with a ``weights_step`` (a test or ``eval``) at the end of rank 0's record."""
    try:
        data = read_tail(run.rank_events(0), tail_bytes)
    except OSError:
        return None
    events = decode_events(data[: data.rfind(b"\n") + 1])
    return next(
        (event for event in reversed(events) if isinstance(event, Validation) and event.weights_step is not None), None
    )


def standing_findings(run: RunDir, *, tail_bytes: int = 1 << 18) -> list[Finding]:
    """Return the findings of a run that goes on which are raised and not cleared, by the end of its own events."""
    try:
        data = read_tail(run.run_events, tail_bytes)
    except OSError:
        return []
    found: dict[tuple[str, int | None], Finding] = {}
    for event in decode_events(data):
        if isinstance(event, Finding):
            found.pop((event.kind, event.rank), None)
            if event.state == "raised":
                found[event.kind, event.rank] = event
    return list(found.values())
