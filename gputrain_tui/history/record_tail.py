"""Reads the newest steps, evaluations and findings of a run from the ends of its event files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gputrain_tui.state.step_losses import newest_loss
from trainer.contract.outcome import ENDED_EARLY
from trainer.contract.record import AnyEvent, Failure, Finding, RankState, RunDir, Step, Validation, decode_events
from trainer.contract.record.regular_file import read_part, read_tail
from trainer.contract.record.unrecorded import read_unrecorded

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
    """Return the newest step that all ranks have done, None for none, and the run's loss at that step.

    A rank whose record has ended, as on a full disk, counts by what it tells of its steps; their losses are not known.
    """
    ranks = [last_steps(run, rank)[-2:] for rank in range(world_size)]
    recorded, loss = newest_loss(list(reversed(steps)) for steps in ranks)
    done = [max(_unrecorded_step(run, rank, steps[-1]), steps[-1].step) for rank, steps in enumerate(ranks) if steps]
    step = min(done, default=0)
    return step or None, loss if step == recorded else None


def _unrecorded_step(run: RunDir, rank: int, last: Step) -> int:
    """Return the step that a rank has reached by what it tells of the end of its record, 0 where that is whole."""
    try:
        told = read_unrecorded(run.gaps / f"{rank}.json")
    except OSError:
        return 0
    stands = told is not None and told.state == "raised" and told.message and told.time >= last.time
    return int(told.evidence.get("step", 0)) if told is not None and stands else 0


def first_time(run: RunDir) -> float | None:
    """Return the time of the first event of ranks and nodes, Unix seconds; None without any."""
    firsts = []
    for path in run.events.glob("*.ndjson"):
        with suppress(OSError):
            firsts += decode_events(read_part(path, 0, TAIL_BYTES).partition(b"\n")[0])
    return min((event.time for event in firsts), default=None)


def newest_states(run: RunDir) -> dict[int, RankState | Failure]:
    """Return by rank its newest state, or its failure."""
    newest: dict[int, RankState | Failure] = {}
    events = [event for path in run.events.glob("*.ndjson") for event in _tail(path)]
    for event in sorted(events, key=lambda each: each.time):
        # A rank state ``failed`` comes with its failure.
        if (
            isinstance(event, Failure | RankState)
            and event.rank is not None
            and getattr(event, "state", "") != "failed"
        ):
            newest[event.rank] = event
    return newest


def last_test(run: RunDir) -> Validation | None:
    """Return the newest evaluation with a ``weights_step`` (a test or ``eval``) at the end of rank 0's record."""
    tests = [e for e in _tail(run.rank_events(0)) if isinstance(e, Validation) and e.weights_step is not None]
    return tests[-1] if tests else None


def early_end(run: RunDir) -> str:
    """Return the condition that ended a training early, by the end of rank 0's record; empty if none did."""
    ends = [e.message for e in _tail(run.rank_events(0)) if isinstance(e, Finding) and e.kind == ENDED_EARLY]
    return ends[-1] if ends else ""


def standing_findings(run: RunDir) -> list[Finding]:
    """Return the findings of a run that goes on which are raised and not cleared, by the end of its own events."""
    standing: dict[tuple[str, int | None], Finding] = {}
    for event in _tail(run.run_events, 1 << 18):
        if isinstance(event, Finding):
            standing.pop((event.kind, event.rank), None)
            if event.state == "raised":
                standing[event.kind, event.rank] = event
    return list(standing.values())
