"""Reads the newest steps, evaluations and findings of a run from the ends of its event files."""

from __future__ import annotations

from pathlib import Path

from gputrain_tui.state.step_losses import newest_loss
from trainer.contract.record import AnyEvent, Finding, RunDir, Step, Validation, decode_events
from trainer.contract.record.regular_file import read_tail

TAIL_BYTES = 16_384
"""Some tens of events."""


def _tail(path: Path, tail_bytes: int = TAIL_BYTES) -> list[AnyEvent]:
    try:
        data = read_tail(path, tail_bytes)
    except OSError:
        return []
    return decode_events(data[: data.rfind(b"\n") + 1])


def last_steps(run: RunDir, rank: int = 0, *, tail_bytes: int = TAIL_BYTES) -> list[Step]:
    """Return the newest steps that a rank recorded, read from the end of its file, in order."""
    return [event for event in _tail(run.rank_events(rank), tail_bytes) if isinstance(event, Step)]


def last_step(run: RunDir, rank: int = 0, *, tail_bytes: int = TAIL_BYTES) -> Step | None:
    """Return the newest step that a rank recorded."""
    return next(reversed(last_steps(run, rank, tail_bytes=tail_bytes)), None)


def newest_loss_of(run: RunDir, world_size: int) -> tuple[int | None, float | None]:
    """Return the newest step that all ranks recorded, None for none, and the run's loss at that step."""
    step, loss = newest_loss(list(reversed(last_steps(run, rank)[-2:])) for rank in range(world_size))
    return step or None, loss


def last_test(run: RunDir) -> Validation | None:
    """Return the newest evaluation with a ``weights_step`` (a test or ``eval``) at the end of rank 0's record."""
    tests = [e for e in _tail(run.rank_events(0)) if isinstance(e, Validation) and e.weights_step is not None]
    return tests[-1] if tests else None


def standing_findings(run: RunDir) -> list[Finding]:
    """Return the findings of a run that goes on which are raised and not cleared, by the end of its own events."""
    standing: dict[tuple[str, int | None], Finding] = {}
    for event in _tail(run.run_events, 1 << 18):
        if isinstance(event, Finding):
            standing.pop((event.kind, event.rank), None)
            if event.state == "raised":
                standing[event.kind, event.rank] = event
    return list(standing.values())
