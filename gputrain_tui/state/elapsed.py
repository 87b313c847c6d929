"""Duration of a run and times of its steps, by a clock that nobody sets; the wall clock only names moments."""

from __future__ import annotations

from trainer.contract.record import Step


def elapsed_s(*, started: float, until: float, measured_s: float | None) -> float:
    """Return how long a run has taken from its start to now or its end, waits in a queue included, seconds.

    ``measured_s`` is the same time by a monotonic clock; None where it was not measured.
    """
    return max(0.0, until - started if measured_s is None else measured_s)


def time_by_boot(event: Step) -> float:
    """Return the time of a step by a clock that nobody sets, Unix seconds; as recorded where the clock was not set."""
    return event.time - (event.clock_set_ms or 0.0) / 1e3
