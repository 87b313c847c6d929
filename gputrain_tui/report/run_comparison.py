"""Runs against a first one, as data: differences with their intervals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import msgspec
from msgspec.structs import replace

from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.history.run_columns import METRIC
from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.step_blocks import (
    BlockSum,
    Interval,
    Measure,
    StepBlocks,
    block_sums,
    difference_interval,
    mean,
)
from gputrain_tui.state.figures import mean_phase_ms, mean_step_ms, samples_per_s, steps_per_s
from gputrain_tui.state.totals import PHASES, Totals


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as it is compared: its report, and its steps in blocks."""

    report: RunReport
    blocks: StepBlocks
    undisturbed: StepBlocks
    """The same steps without their waits for a core."""
    nan_since: int | None = None
    """Step from which its loss is NaN or infinite; None where it is not."""

    @property
    def counts_anew(self) -> bool:
        """Whether a script was started again, so that none of its losses has its step."""
        return self.report.counts_anew

    def has_loss_at(self, step: int | None) -> bool:
        """Whether its loss at a step is a number, as far as it is known to be none; None: at its end."""
        return self.nan_since is None or (step is not None and step < self.nan_since)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a run against that of the first."""

    before: float | None
    """Of the first run."""
    now: float | None
    """Of the run that is compared; null if it is not known."""
    change: float | None = None
    """Relative, 0.05 for 5 % more; for a loss absolute. None where one of both is not known."""
    interval: Interval | None = None
    """95 % of the change; None where it is not known, or the figure is a single number."""
    beyond_noise: bool = False
    """Whether the interval does not contain 0."""
    is_noise: bool = False
    """Whether it contains 0. Neither is known of a change without an interval, but for single numbers."""
    undisturbed_interval: Interval | None = None
    """The hull of 95 % intervals of the change without the time in which ranks waited for a core, in either run or in
    both, and without twice that: other ranks wait for the late one, and who shares a core finds its caches cold."""


class FigureComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of all runs."""

    name: str
    """As in a condition, such as ``step_ms``."""
    unit: str
    """Empty where it has none."""
    relative: bool
    """Whether changes are relative, 0.05 for 5 % more."""
    higher_is_better: bool | None = None
    """None where it is not known: of a metric of the user's own that is not the runs' ``train.best_metric``."""
    differences: tuple[Difference, ...]
    """One for each run after the first."""
    step: int | None = None
    """At which losses are compared; None for another figure, or where it is not the same of all runs."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of ``--fail-on``, checked."""

    condition: str
    """As it was given."""
    run: str
    """The run that it was checked on."""
    exceeded: bool | None
    """None: it cannot be checked, as a figure is not known or no interval."""
    decided: bool = True
    """False: the runs are too noisy, or were disturbed too much, to tell whether it is exceeded; it then does not count
    as exceeded."""
    text: str
    """Why, in one line."""


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Runs against the first one of them."""

    schema_version: int = 1
    """Changes when a key goes or changes its meaning, not when one is added."""
    runs: tuple[str, ...]
    """In rounds, those of the newest one."""
    rounds: tuple[tuple[str, ...], ...] = ()
    """Runs that were made in turns, the oldest round first; differences are then means over the rounds."""
    recipe: tuple[DifferingValues, ...] = ()
    """Keys of the recipes that differ."""
    recipe_unknown: str = ""
    """Why the recipes are not compared; empty where they are."""
    versions: tuple[DifferingValues, ...] = ()
    """Of torch, driver and so on, on all hosts of a run; of runs whose record has them."""
    steps: tuple[int | None, ...] = ()
    """Of each of ``runs`` the last step that all its ranks have done; None before the first."""
    incomparable: tuple[str, ...] = ()
    """Why the speed of the runs cannot be compared: other hardware or ranks, or no steps."""
    nan_since: tuple[int | None, ...] = ()
    """Of each of ``runs`` the step from which its loss is NaN or infinite; None where it is not."""
    figures: tuple[FigureComparison, ...] = ()
    """Those that are known of any run."""
    limits: tuple[Limit, ...] = ()
    """The conditions of ``--fail-on``, checked on each run after the first."""


@dataclass(frozen=True)
class Figure:
    """How a figure is taken from the sums of a block's ranks."""

    name: str
    unit: str
    of: Measure
    over: Callable[[Sequence[Totals]], float]
    """What it is a mean over: the steps of a block, or their time."""


def summed(field: str) -> Callable[[Sequence[Totals]], float]:
    """Return a function that sums a field over the ranks of a block."""
    return lambda block: sum(getattr(sums, field) for sums in block)


block_steps = summed("timed_steps")
"""Returns the steps of a block that were timed, over all ranks."""


def block_loss(block: Sequence[Totals]) -> float | None:
    """Return the mean loss of a block; None where none is known.

    Ranks count by their samples, as their gradients do; alike where the samples of one are not known.
    """
    known = [sums for sums in block if sums.loss_steps]
    if all(sums.loss_samples for sums in known):
        samples = sum(sums.loss_samples for sums in known)
        return sum(sums.sample_loss for sums in known) / samples if samples else None
    return sum(sums.loss for sums in known) / sum(sums.loss_steps for sums in known)


def block_time_ms(block: Sequence[Totals]) -> float:
    """Return the time of a block's steps, ms: validations, checkpoints and starts are not in it."""
    return sum(sums.step_ms for sums in block) / max(len(block), 1)


SPEEDS = (
    Figure("step_ms", "ms", mean_step_ms, block_steps),
    *(Figure(f"{phase}_ms", "ms", partial(mean_phase_ms, phase=phase), summed("whole_steps")) for phase in PHASES),
    Figure("throughput", "samples/s", samples_per_s, block_time_ms),
    Figure("steps_per_s", "steps/s", steps_per_s, block_time_ms),
)
"""Figures over the steps after the warm-up, by relative difference."""
WITH_INTERVAL = tuple(figure.name for figure in SPEEDS)
STEP_LOSSES = ("loss", "loss_by_samples", "loss_by_time")
"""Those of training, at a step."""
LOSSES = (*STEP_LOSSES, "valid", "best_valid")
SINGLE = ("peak_memory", *LOSSES)
"""Further names of conditions."""


def compare(
    runs: Sequence[RecordedRun],
    *,
    recipe: Sequence[DifferingValues] = (),
    loss_steps: Iterable[int] = (),
    intervals: bool = True,
) -> RunComparison:
    """Compare each run with the first, with or without intervals.

    ``loss_steps``: at which losses are compared besides the last one.
    """
    speed, losses = partial(_speed, intervals=intervals), partial(_losses, intervals=intervals)
    figures = [speed(figure, runs) for figure in SPEEDS]
    figures.append(losses("loss", runs, [min(run.blocks.last_step for run in runs)] * len(runs)))
    # What a resumed run had seen before is not in its record.
    of_amounts = (("loss_by_samples", summed("samples")), ("loss_by_time", block_time_ms))
    for name, of in of_amounts if len({run.blocks.first_step for run in runs}) == 1 else ():
        if amount := min(run.blocks.amount(of) for run in runs):
            figures.append(losses(name, runs, [run.blocks.step_after(amount, of) for run in runs]))
    figures += [losses(f"loss@{step}", runs, [step] * len(runs)) for step in sorted({*loss_steps})]
    figures.append(_single("valid", "", runs, _valid, relative=False))
    if len({run.report.best_valid.metric for run in runs if run.report.best_valid is not None}) == 1:
        figures.append(_single("best_valid", "", runs, _best_valid, relative=False))
    figures.append(_single("peak_memory", "bytes", runs, _peak_memory, relative=True))
    for name in dict.fromkeys(name for run in runs for name in run.report.metrics):
        figures.append(_single(METRIC + name, "", runs, partial(_metric, name=name), relative=False))
    known = tuple(
        replace(each, higher_is_better=_higher_is_better(each.name, runs))
        for each in figures
        if any(d.before is not None or d.now is not None for d in each.differences)
    )
    return RunComparison(
        runs=tuple(run.report.id for run in runs),
        recipe=tuple(recipe),
        versions=tuple(_versions([run.report for run in runs])),
        steps=tuple(run.report.step for run in runs),
        incomparable=tuple(incomparable([run.report for run in runs])),
        nan_since=tuple(run.nan_since for run in runs),
        figures=known,
    )


def _higher_is_better(figure: str, runs: Sequence[RecordedRun]) -> bool | None:
    criteria = {(best.metric, best.maximize) for run in runs if (best := run.report.best_valid) is not None}
    for metric, maximize in criteria if len(criteria) == 1 else ():
        if figure in ("best_valid", METRIC + metric):
            return maximize
    return None if figure.startswith(METRIC) else figure in ("throughput", "steps_per_s")


def _versions(reports: Sequence[RunReport]) -> Iterator[DifferingValues]:
    """Yield the versions that differ; nothing where a run has none on record."""
    of_runs: list[dict[str, str]] = []
    for report in reports:
        of_hosts: dict[str, list[str]] = {}
        for host in report.hosts:
            for name, version in host.versions.items():
                of_hosts.setdefault(name, []).append(version)
        of_runs.append({name: ", ".join(sorted({*each})) for name, each in of_hosts.items()})
    if not all(of_runs):
        return
    for name in dict.fromkeys(name for versions in of_runs for name in versions):
        values = tuple(versions.get(name, "") for versions in of_runs)
        if len({*values}) > 1:
            yield DifferingValues(key=name, values=values)


def incomparable(reports: Sequence[RunReport]) -> list[str]:
    """Return why speeds of runs cannot be compared, by name."""
    first, reasons = reports[0], []
    reasons += [f"{each.id} has no step" for each in reports if not each.step]
    for other in reports[1:]:
        if other.world_size != first.world_size:
            reasons.append(f"{first.id} has {first.world_size} ranks, {other.id} has {other.world_size}")
        for what, of in (("devices", _devices), ("cores of the hosts", _cores)):
            one, two = of(first), of(other)
            if one and two and one != two and other.world_size == first.world_size:
                reasons.append(f"{what}: {one} in {first.id}, {two} in {other.id}")
    return reasons


def _devices(report: RunReport) -> str:
    """Return the kinds of devices with their counts: GPUs differ in their UUIDs, which are no kind."""
    kinds = [(rank.device or "").partition(" GPU-")[0] for rank in report.ranks]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted({*kinds} - {""}))


def _cores(report: RunReport) -> str:
    return ", ".join(sorted(str(host.cores) for host in report.hosts if host.cores is not None))


def _speed(figure: Figure, runs: Sequence[RecordedRun], *, intervals: bool) -> FigureComparison:
    values = [block_sums(run.blocks.after_warm_up(), figure.of, figure.over) for run in runs]
    changes = [_difference(values[0], other, relative=True, intervals=intervals) for other in values[1:]]
    if intervals:
        changes = _with_undisturbed(changes, figure, runs, values)
    return FigureComparison(name=figure.name, unit=figure.unit, relative=True, differences=tuple(changes))


def _with_undisturbed(
    changes: Sequence[Difference], figure: Figure, runs: Sequence[RecordedRun], values: Sequence[Sequence[BlockSum]]
) -> list[Difference]:
    alone = [block_sums(run.undisturbed.after_warm_up(), figure.of, figure.over) for run in runs]
    twice = [_less_twice(*each, is_time=figure.unit == "ms") for each in zip(values, alone, strict=True)]
    found = []
    for index, change in enumerate(changes, 1):
        pairs = [(rows[0], rows[index]) for rows in (values, alone, twice)]
        found.append(replace(change, undisturbed_interval=_undisturbed(change.interval, *pairs)))
    return found


Pair = tuple[Sequence[BlockSum], Sequence[BlockSum]]
"""Sums of the blocks of the first run, and of another one."""


def _undisturbed(measured: Interval | None, values: Pair, alone: Pair, twice: Pair) -> Interval | None:
    """Return the hull of the intervals with the waits of either run, of both or of none left out."""
    found = [difference_interval(*pair, relative=True) for pair in (alone, twice)]
    if measured is not None and all(alone) and all(mean(row) for row in values):
        before, now = (mean(less) / mean(whole) for less, whole in zip(alone, values, strict=True))
        low, high = measured
        found += [((1 + low) * factor - 1, (1 + high) * factor - 1) for factor in (now, 1 / before if before else 1.0)]
    known = [each for each in found if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _less_twice(values: Sequence[BlockSum], alone: Sequence[BlockSum], *, is_time: bool) -> list[BlockSum]:
    """Return times, or the times of rates, less twice what ``alone`` lacks of them; a tenth is left at least."""
    if not is_time:
        turned = _less_twice([(t, n) for n, t in values], [(t, n) for n, t in alone], is_time=True)
        return [(n, t) for t, n in turned]
    # Where not as many blocks have a figure without the waits, there is no telling which belong together.
    pairs = zip(values, alone, strict=True) if len(values) == len(alone) else ()
    return [(max(2 * less - whole, less / 10), count) for (whole, _), (less, count) in pairs]


def _losses(name: str, runs: Sequence[RecordedRun], steps: Sequence[int], *, intervals: bool) -> FigureComparison:
    """Compare the losses around a step of each run, each the mean of the blocks near it."""
    same = steps[0] if len({*steps}) == 1 else None
    window = {} if same is None else _common_steps(runs)
    near = [
        run.blocks.around(step, **window) if not run.counts_anew and run.has_loss_at(step) else []
        for run, step in zip(runs, steps, strict=True)
    ]
    values = [block_sums(each, block_loss, summed("loss_steps")) for each in near]
    changes = tuple(_difference(values[0], other, relative=False, intervals=intervals) for other in values[1:])
    unit = next((run.report.loss_unit for run in runs if run.report.loss_unit), "")
    return FigureComparison(name=name, unit=unit, relative=False, differences=changes, step=same)


def _common_steps(runs: Sequence[RecordedRun]) -> dict[str, int]:
    """Return the length of the longest blocks, and the steps between which all runs have whole ones."""
    firsts, lasts = {run.blocks.first_step for run in runs}, {run.blocks.last_step for run in runs}
    common = {"length": max(run.blocks.length for run in runs)}
    if len(firsts) > 1:
        common["first"] = max(firsts)
    if len(lasts) > 1:
        common["last"] = min(lasts)
    return common


def _difference(before: Sequence[BlockSum], now: Sequence[BlockSum], *, relative: bool, intervals: bool) -> Difference:
    if not before or not now:
        return Difference(before=mean(before) if before else None, now=mean(now) if now else None)
    one, other = mean(before), mean(now)
    change = None if relative and not one else other / one - 1 if relative else other - one
    interval = difference_interval(before, now, relative=relative) if intervals else None
    return difference_of(one, other, change, interval)


def difference_of(before: float, now: float, change: float | None, interval: Interval | None) -> Difference:
    """Return the difference, noise where its interval contains 0."""
    noise = change == 0 if interval is None else interval[0] <= 0 <= interval[1]
    beyond = interval is not None and not noise
    return Difference(before=before, now=now, change=change, interval=interval, beyond_noise=beyond, is_noise=noise)


def _single(
    name: str, unit: str, runs: Sequence[RecordedRun], of: Callable[[RunReport], float | None], *, relative: bool
) -> FigureComparison:
    values = [of(run.report) for run in runs]
    differences = tuple(_single_difference(values[0], other, relative=relative) for other in values[1:])
    return FigureComparison(name=name, unit=unit, relative=relative, differences=differences)


def _single_difference(before: float | None, now: float | None, *, relative: bool) -> Difference:
    if before is None or now is None or (relative and not before):
        return Difference(before=before, now=now)
    change = now / before - 1 if relative else now - before
    return Difference(before=before, now=now, change=change, beyond_noise=change != 0, is_noise=change == 0)


def _valid(report: RunReport) -> float | None:
    return next((each.loss for each in reversed(report.validations) if each.split == "valid"), None)


def _best_valid(report: RunReport) -> float | None:
    return None if report.best_valid is None else report.best_valid.value


def _peak_memory(report: RunReport) -> float | None:
    peaks = [rank.memory_peak_bytes for rank in report.ranks if rank.memory_peak_bytes is not None]
    return float(max(peaks)) if peaks else None


def _metric(report: RunReport, *, name: str) -> float | None:
    return report.metrics.get(name)


def change_text(difference: Difference, *, relative: bool) -> str:
    """Return a change with its interval, such as ``+5.1 % (+4.2 to +6.0)``."""
    if difference.change is None or not isfinite(difference.change):
        return "–"
    scale, digits, unit = (100.0, 1, " %") if relative else (1.0, 4, "")
    text = f"{scale * difference.change:+.{digits}f}{unit}"
    if difference.interval is not None:
        low, high = difference.interval
        text += f" ({scale * low:+.{digits}f} to {scale * high:+.{digits}f})"
    return text


def figure_title(figure: FigureComparison) -> str:
    """Return the words for a figure with its unit, such as ``step, ms``; a metric's name stays as it is."""
    name = figure.name if figure.name.startswith(METRIC) else figure.name.replace("_", " ").removesuffix(" ms")
    if figure.name.partition("@")[0] == "loss" and figure.step is not None:
        name = f"mean loss around step {figure.step:,}"  # of the blocks near it
    elif figure.name in STEP_LOSSES:
        name = f"mean {name}"
    return f"{name}, {figure.unit}" if figure.unit else name


def limit_result(limit: Limit) -> str:
    """Return ``exceeded``, ``kept``, ``undecided`` or ``unknown``."""
    if limit.exceeded is None:
        return "unknown"
    return "exceeded" if limit.exceeded else "kept" if limit.decided else "undecided"
