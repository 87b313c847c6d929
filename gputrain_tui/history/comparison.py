"""Pure: compares two to six runs by their recipes, and by their losses over steps or time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan
from typing import Any, Literal

import msgspec

from gputrain_tui.history.metric_curves import MetricCurves
from gputrain_tui.history.series import Series, interpolate, smooth
from gputrain_tui.history.step_axis import AxisName
from gputrain_tui.recipe.model import LAUNCH_OPTIONS, Recipe
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.recipe.values import value_text
from gputrain_tui.state.best_validation import RecordedValidations
from gputrain_tui.state.figures import Throughput, mean_share, samples_per_s, steps_per_s
from gputrain_tui.state.rank_state import KEPT
from gputrain_tui.state.step_losses import newest_loss
from gputrain_tui.state.totals import ZERO_TOTALS, Totals
from trainer.contract import record
from trainer.contract.builtin_tasks import BUILT_IN

MIN_RUNS, MAX_RUNS = 2, 6
"""Runs that can be compared at once: a terminal can show six distinct colours."""


class DifferingValues(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe key, or what has a version, whose values differ between runs."""

    key: str
    """``train.lr``."""
    values: tuple[str, ...]
    """One per run, as text; empty where it has none."""


def differences(recipes: Sequence[Recipe]) -> list[DifferingValues]:
    """Return the keys with different values, defaults included, by table and in the order of a recipe."""
    all_values = [recipe_values(recipe) for recipe in recipes]
    tables = ("name", "cluster", "slurm", "task", "train")
    keys = sorted({key: None for values in all_values for key in values}, key=lambda k: tables.index(k.split(".")[0]))
    rows = [(key, tuple(value_text(values.get(key)) for values in all_values)) for key in keys]
    return [DifferingValues(key=key, values=texts) for key, texts in rows if len(set(texts)) > 1]


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Return every key of a recipe with its value, defaults included."""
    tables: dict[str, Any] = {"name": recipe.name, "cluster": recipe.cluster}
    if recipe.slurm is not None:
        tables["slurm"] = recipe.slurm
    script = {} if recipe.script is None else msgspec.to_builtins(recipe.script)
    launch = {key: getattr(recipe.launch, key) for key in LAUNCH_OPTIONS}
    train = {"task": recipe.train.task or None, **script}
    train |= {key: value for key, value in msgspec.to_builtins(recipe.train).items() if key != "task"} | launch
    return dict(_flat("", msgspec.to_builtins(tables) | {"train": train, "task": _task_values(recipe)}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, each with its key such as ``cluster.nodes[0].host``."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for index, each in enumerate(value):
            yield from _flat(f"{name}[{index}]", {key: part for key, part in each.items() if part is not None})
    else:
        yield name, value


def _task_values(recipe: Recipe) -> dict[str, Any]:
    """Return a task's options; defaults are included for built-in tasks only, as a user's module is not imported."""
    if recipe.train.task not in BUILT_IN:
        return dict(recipe.task_options)
    options = describe_task(recipe.train.task)
    return {option.name: recipe.task_options.get(option.name, option.default) for option in options}


@dataclass(frozen=True, kw_only=True)
class CurvePoints:
    """A curve: values over an axis, both of one length."""

    at: Sequence[float]
    """Steps, or seconds since the start; ascending."""
    values: Sequence[float]


Measure = Literal["loss", "samples_per_s", "steps_per_s", "sync_exposed_ms"]
MEASURES: tuple[Measure, ...] = ("loss", "samples_per_s", "sync_exposed_ms")
"""Those to choose from; steps a second stand in for samples where no run counts any."""


class CurveHistory:
    """One run's curves for a comparison, from its events: the run's loss, medians of its ranks' waits, or its rates."""

    def __init__(self, world_size: int) -> None:
        self.series = Series(world_size)
        self.metrics = MetricCurves()
        self.validations = RecordedValidations(KEPT)
        self._started: float | None = None
        self._totals: dict[int, Totals] = {}
        self._newest: dict[int, tuple[record.Step, ...]] = {}
        """The last two step events of each rank, newest first."""

    def apply(self, event: record.AnyEvent) -> None:
        if isinstance(event, record.Step):
            self.series.apply(event)
            self._newest[event.rank] = (event, *self._newest.get(event.rank, ())[:1])
            self._totals[event.rank] = self._totals.get(event.rank, ZERO_TOTALS).plus(event)
        elif isinstance(event, record.RunStarted) and self._started is None:
            self._started = event.time
        elif isinstance(event, record.Metrics | record.NoiseScale):
            self.metrics.apply(event)
        elif isinstance(event, record.Validation):
            self.validations.add(event)
        elif isinstance(event, record.TrainingPlan):
            self.validations.begin(event)
        elif isinstance(event, record.World):
            self.series.change_world(event.world_size)
            for by_rank in (self._newest, self._totals):  # figures are of the ranks that are left
                for rank in [rank for rank in by_rank if rank >= event.world_size]:
                    del by_rank[rank]
        elif isinstance(event, record.RunEnded):
            self.series.flush()  # a rank that was killed has not recorded its last step

    @property
    def first_step(self) -> int:
        """Oldest step: a resumed run does not begin at 1."""
        return self.series.axis.first_step

    @property
    def last_step(self) -> int:
        return self.series.last_step

    @property
    def last_second(self) -> float:
        return self.seconds_at(inf)

    @property
    def loss(self) -> float | None:
        """Mean of the ranks' losses at the newest step that all of them have done, nats; None before the first.

        NaN where that is why the record has none.
        """
        _, loss = newest_loss(self._newest.values())
        is_nan = loss is None and any("loss" in event.non_finite for event, *_ in self._newest.values())
        return nan if is_nan else loss

    @property
    def rates(self) -> Throughput:
        """Rates over the whole run."""
        totals = self._totals.values()
        return Throughput(samples_per_s=samples_per_s(totals), steps_per_s=steps_per_s(totals))

    @property
    def sync_share(self) -> float | None:
        return mean_share(self._totals.values(), "sync")

    def points(
        self,
        columns: int,
        *,
        over_time: bool,
        smoothing: int = 0,
        measure: Measure = "loss",
        own_metric: str | None = None,
    ) -> CurvePoints:
        """Return a curve in ``columns`` columns of equally many steps, each at its middle.

        Over steps, or seconds since the start, and smoothed over ``smoothing`` steps; values are nats, samples of all
        ranks or steps per second, or milliseconds. ``own_metric`` is one of the user's own to take instead: means over
        the ranks that report it.
        """
        window = self.series.window("sync_exposed_ms" if measure == "sync_exposed_ms" else "loss", columns)
        if not window.last_step or (own_metric is not None and own_metric not in self.metrics.names):
            return CurvePoints(at=(), values=())
        first, count = window.first_step, window.last_step - window.first_step + 1
        edges = [-(-column * count // columns) for column in range(columns + 1)]
        # With more columns than steps, a column without a step is placed between the steps beside it.
        steps = [
            first + ((low + high - 1) / 2 if high > low else column * count / columns)
            for column, (low, high) in enumerate(pairwise(edges))
        ]
        at = [self.seconds_at(step) for step in steps] if over_time else steps
        values = window.middle
        if own_metric is not None:
            values = self.metrics[own_metric].window(columns, (first, window.last_step)).middle
        elif measure == "samples_per_s" or measure == "steps_per_s":
            values = self._rates(first, count, columns, "step" if measure == "steps_per_s" else "samples")
        return CurvePoints(at=at, values=smooth(values, smoothing, count / columns))

    def _rates(self, first: int, count: int, columns: int, of: AxisName) -> list[float]:
        """Return steps or samples of all ranks per second of stepping, in columns of equal steps.

        Samples are NaN where they are not known.
        """
        at, rates = self.series.axis.at, list[float]()
        if not self.series.axis.has(of):
            return [nan] * columns
        for low, high in pairwise(first - 1 + column * count / columns for column in range(columns + 1)):
            seconds = at("stepping", high) - at("stepping", low)
            rates.append((at(of, high) - at(of, low)) / seconds if seconds > 0 else nan)
        return rates

    def seconds_at(self, step: float) -> float:
        """Return the time of a step since the start, interpolated linearly."""
        axis = self.series.axis
        if not axis:
            return 0.0
        waited = 0.0 if self._started is None else max(axis.began - self._started, 0.0)
        return waited + axis.at("time", step)


def resampled(points: CurvePoints, columns: int, last: float, *, first: float = 0.0) -> list[float]:
    """Return a curve in columns over an axis from ``first`` to ``last``; NaN where it has no value."""
    line = [nan] * columns
    if last <= first:
        return line
    before = -1
    for at, value in zip(points.at, points.values, strict=True):
        if value != value:
            continue
        column = min(max(int((at - first) / (last - first) * columns), 0), columns - 1)
        if 0 <= before < column - 1:
            interpolate(line, before, column, value)
        line[column] = value
        before = column
    return line
