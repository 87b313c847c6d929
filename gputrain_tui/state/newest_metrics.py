"""A user's own metrics as they are now: the newest value of each name, over the ranks that report it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan

from trainer.contract.record import Metrics, Validation

MAX_NAMES = 1024
"""Names that are kept of a run: each rank may report its own."""


class NewestMetrics:
    """Newest metrics of a run by name, changed by ``apply`` only."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, float, dict[int, float]]] = {}
        """By name the step, its time, and the values by rank."""

    def apply(self, event: Metrics) -> None:
        """Take a rank's metrics; after a restart a step may come again."""
        for name, value in own_values(event):
            step, time, by_rank = self._newest.get(name, (-1, 0.0, {}))
            if event.step > step or (event.step < step and event.time > time):
                if step < 0 and len(self._newest) >= MAX_NAMES:
                    continue
                self._newest[name] = event.step, event.time, {event.rank: value}
            elif event.step == step:
                by_rank[event.rank] = value

    def __bool__(self) -> bool:
        return bool(self._newest)

    def values(self) -> dict[str, float]:
        """Return the mean over the ranks at the newest step of each name, in the order in which the names appeared."""
        return {name: sum(by_rank.values()) / len(by_rank) for name, (_, _, by_rank) in self._newest.items()}

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return the newest values of one rank, as far as it has reported at the newest step of a name."""
        return {name: by_rank[rank] for name, (_, _, by_rank) in self._newest.items() if rank in by_rank}


def newest_values(metrics: NewestMetrics, validations: Sequence[Validation]) -> dict[str, float]:
    """Return the newest value by name; of a metric that is validated, that of the newest validation.

    A validation is over all samples of its split; in training a value is of the few steps since the one before.
    """
    return metrics.values() | validated_metrics(validations)


def validated_metrics(validations: Sequence[Validation]) -> dict[str, float]:
    """Return the metrics of the newest validation that has each."""
    return {name: value for each in validations if each.split == "valid" for name, value in each.metrics.items()}


def own_values(event: Metrics) -> Iterator[tuple[str, float]]:
    """Yield names and values, NaN for one that was not finite."""
    yield from event.values.items()
    for name in event.non_finite:
        yield name, nan
