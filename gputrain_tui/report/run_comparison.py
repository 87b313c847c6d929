"""Runs against a first one, as data: differences with their intervals, and conditions on them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import msgspec
from msgspec.structs import replace

from gputrain_tui.history.run_columns import METRIC
from gputrain_tui.report.run_report import RunReport
from gputrain_tui.report.step_blocks import (
    MIN_VALUES,
    Interval,
    Measure,
    StepBlocks,
    block_values,
    difference_interval,
    mean,
)
from gputrain_tui.state.figures import mean_phase_ms, mean_step_ms, samples_per_s, steps_per_s
from gputrain_tui.state.totals import PHASES, Totals
from trainer.contract.errors import RequestError, nearest, quoted

COMPARISON_SCHEMA_VERSION = 1
"""Changes when a key goes or changes its meaning, not when one is added."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as it is compared: its report, and its steps in blocks."""

    report: RunReport
    blocks: StepBlocks
    undisturbed: StepBlocks
    """The same steps without their waits for a core."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a run against that of the first."""

    before: float | None
    """Of the first run."""
    now: float | None
    change: float | None = None
    """Relative, 0.05 for 5 % more; for a loss absolute. None where one of both is not known."""
    interval: Interval | None = None
    """95 % of the change; None where it is not known, or the figure is a single number."""
    beyond_noise: bool = False
    """Whether the interval does not contain 0."""
    undisturbed_interval: Interval | None = None
    """95 % of the change without the time in which ranks waited for a core: what other processes took is left out."""


class FigureComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of all runs."""

    name: str
    unit: str
    relative: bool
    differences: tuple[Difference, ...]
    """One for each run after the first."""


class DifferingValues(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe key, or what has a version, whose values differ."""

    key: str
    values: tuple[str, ...]
    """One for each run; empty where it has none."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of ``--fail-on``, checked."""

    condition: str
    run: str
    exceeded: bool | None
    """None: it cannot be checked, as a figure is not known or no interval."""
    text: str
    """Why, in one line."""


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Runs against the first one of them."""

    schema_version: int = COMPARISON_SCHEMA_VERSION
    runs: tuple[str, ...]
    recipe: tuple[DifferingValues, ...] = ()
    versions: tuple[DifferingValues, ...] = ()
    """Of torch, driver and so on, on all hosts of a run; of runs whose record has them."""
    incomparable: tuple[str, ...] = ()
    """Why the speed of the runs cannot be compared: other hardware or ranks, or no steps."""
    figures: tuple[FigureComparison, ...] = ()
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Figure:
    """How a figure is taken from the sums of a block's ranks."""

    name: str
    unit: str
    of: Measure


def block_loss(block: Sequence[Totals]) -> float | None:
    """Return the mean loss of a block; None where none is known."""
    steps = sum(sums.loss_steps for sums in block)
    return sum(sums.loss for sums in block) / steps if steps else None


def block_samples(block: Sequence[Totals]) -> float:
    """Return the samples of a block over all ranks."""
    return sum(sums.samples for sums in block)


def block_time_ms(block: Sequence[Totals]) -> float:
    """Return the time of a block's steps, ms: validations, checkpoints and starts are not in it."""
    return sum(sums.step_ms for sums in block) / max(len(block), 1)


SPEEDS = (
    Figure("step_ms", "ms", mean_step_ms),
    *(Figure(f"{phase}_ms", "ms", partial(mean_phase_ms, phase=phase)) for phase in PHASES),
    Figure("throughput", "samples/s", samples_per_s),
    Figure("steps_per_s", "steps/s", steps_per_s),
)
"""Figures over the steps after the warm-up, by relative difference."""
WITH_INTERVAL = tuple(figure.name for figure in SPEEDS)
LOSSES = ("loss", "loss_by_samples", "loss_by_time", "valid")
SINGLE = ("peak_memory", *LOSSES)
"""Further names of conditions."""


def compare(
    runs: Sequence[RecordedRun], *, recipe: Sequence[DifferingValues] = (), conditions: Sequence[Condition] = ()
) -> RunComparison:
    """Compare each run with the first."""
    figures = [_speed(figure, runs) for figure in SPEEDS]
    figures.append(_losses("loss", runs, [min(run.blocks.last_step for run in runs)] * len(runs)))
    for name, of in (("loss_by_samples", block_samples), ("loss_by_time", block_time_ms)):
        if amount := min(run.blocks.amount(of) for run in runs):
            figures.append(_losses(name, runs, [run.blocks.step_after(amount, of) for run in runs]))
    steps = {each.at for each in conditions if each.at is not None}
    figures += [_losses(f"loss@{step}", runs, [step] * len(runs)) for step in sorted(steps)]
    figures.append(_single("valid", "", runs, _valid, relative=False))
    figures.append(_single("peak_memory", "bytes", runs, _peak_memory, relative=True))
    for name in dict.fromkeys(name for run in runs for name in run.report.metrics):
        figures.append(_single(METRIC + name, "", runs, partial(_metric, name=name), relative=False))
    known = tuple(each for each in figures if any(d.before is not None or d.now is not None for d in each.differences))
    return RunComparison(
        runs=tuple(run.report.id for run in runs),
        recipe=tuple(recipe),
        versions=tuple(_versions([run.report for run in runs])),
        incomparable=tuple(incomparable([run.report for run in runs])),
        figures=known,
        limits=tuple(
            _checked(condition, known, runs, index) for index in range(1, len(runs)) for condition in conditions
        ),
    )


def _versions(reports: Sequence[RunReport]) -> Iterator[DifferingValues]:
    """Yield the versions that differ; nothing where a record of before versions were kept is among the runs."""
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


def _speed(figure: Figure, runs: Sequence[RecordedRun]) -> FigureComparison:
    values = [block_values(run.blocks.after_warm_up(), figure.of) for run in runs]
    alone = [block_values(run.undisturbed.after_warm_up(), figure.of) for run in runs]
    changes = tuple(
        replace(
            _difference(values[0], values[index], relative=True),
            undisturbed_interval=difference_interval(alone[0], alone[index], relative=True),
        )
        for index in range(1, len(runs))
    )
    return FigureComparison(name=figure.name, unit=figure.unit, relative=True, differences=changes)


def _losses(name: str, runs: Sequence[RecordedRun], steps: Sequence[int]) -> FigureComparison:
    """Compare the losses around a step of each run, each the mean of the blocks near it."""
    values = [block_values(run.blocks.around(step), block_loss) for run, step in zip(runs, steps, strict=True)]
    changes = tuple(_difference(values[0], other, relative=False) for other in values[1:])
    unit = next((run.report.loss_unit for run in runs if run.report.loss_unit), "")
    return FigureComparison(name=name, unit=unit, relative=False, differences=changes)


def _difference(before: Sequence[float], now: Sequence[float], *, relative: bool) -> Difference:
    if not before or not now:
        return Difference(before=mean(before) if before else None, now=mean(now) if now else None)
    one, other = mean(before), mean(now)
    change = None if relative and not one else other / one - 1 if relative else other - one
    interval = difference_interval(before, now, relative=relative)
    beyond = interval is not None and not interval[0] <= 0 <= interval[1]
    return Difference(before=one, now=other, change=change, interval=interval, beyond_noise=beyond)


def _single(
    name: str, unit: str, runs: Sequence[RecordedRun], of: Callable[[RunReport], float | None], *, relative: bool
) -> FigureComparison:
    values = [of(run.report) for run in runs]
    return FigureComparison(
        name=name,
        unit=unit,
        relative=relative,
        differences=tuple(_single_difference(values[0], other, relative=relative) for other in values[1:]),
    )


def _single_difference(before: float | None, now: float | None, *, relative: bool) -> Difference:
    if before is None or now is None or (relative and not before):
        return Difference(before=before, now=now)
    change = now / before - 1 if relative else now - before
    return Difference(before=before, now=now, change=change, beyond_noise=change != 0)


def _valid(report: RunReport) -> float | None:
    return next((each.loss for each in reversed(report.validations) if each.split == "valid"), None)


def _peak_memory(report: RunReport) -> float | None:
    peaks = [rank.memory_peak_bytes for rank in report.ranks if rank.memory_peak_bytes is not None]
    return float(max(peaks)) if peaks else None


def _metric(report: RunReport, *, name: str) -> float | None:
    return report.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition of ``--fail-on``, such as ``step_ms>+5%`` or ``finding:straggler``."""

    text: str
    name: str
    """A figure, or ``finding``."""
    at: int | None = None
    """Step of a loss."""
    sign: int = 1
    """1: more fails, -1: less."""
    limit: float = 0.0
    """Of the change: relative, or absolute for a loss or a metric."""
    finding: str = ""


PATTERN = re.compile(
    rf"(?:(?P<metric>{METRIC}.+?)|(?P<name>[a-z_]+)(?:@(?P<at>\d+))?)"
    r"\s*(?P<sign>[<>])\s*(?P<limit>[+-]?\d+(?:\.\d+)?)\s*(?P<percent>%?)"
)


def parse_condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        RequestError: it is none; one line with what is allowed.
    """
    if text.startswith("finding:"):
        kind = text.removeprefix("finding:")
        if not re.fullmatch(r"[a-z_]+", kind):
            raise RequestError(f"--fail-on {quoted(text)}: name a kind of finding, such as finding:straggler")
        return Condition(text=text, name="finding", finding=kind)
    match = PATTERN.fullmatch(text.strip())
    if match is None:
        raise RequestError(
            f"--fail-on {quoted(text)} is no condition: write FIGURE>+LIMIT or FIGURE<-LIMIT, such as 'step_ms>+5%', "
            "'throughput<-5%', 'loss@1000>+0.02', 'metric:val/acc<-0.01', or finding:KIND"
        )
    name, sign = match["metric"] or match["name"], 1 if match["sign"] == ">" else -1
    names = [*WITH_INTERVAL, *SINGLE]
    if name not in names and not match["metric"]:
        raise RequestError(
            f"--fail-on {quoted(text)}: {quoted(name)} is no figure{nearest(name, names)}; they are {', '.join(names)}"
        )
    absolute = name in LOSSES or bool(match["metric"])
    if bool(match["percent"]) == absolute:
        unit = "an absolute limit, such as +0.02" if absolute else "a limit in percent, such as +5%"
        raise RequestError(f"--fail-on {quoted(text)}: {name} takes {unit}")
    if match["at"] is not None and name != "loss":
        raise RequestError(f"--fail-on {quoted(text)}: only a loss is taken at a step, as loss@1000")
    limit = float(match["limit"]) / (1 if absolute else 100)
    if limit * sign < 0:
        raise RequestError(f"--fail-on {quoted(text)}: > takes a limit of 0 or more, < one of 0 or less")
    return Condition(
        text=text,
        name=name,
        at=None if match["at"] is None else int(match["at"]),
        sign=sign,
        limit=limit,
    )


def _checked(
    condition: Condition, figures: Sequence[FigureComparison], runs: Sequence[RecordedRun], index: int
) -> Limit:
    run = runs[index].report
    if condition.name == "finding":
        return _finding_limit(condition, runs[0].report, run)
    name = condition.name if condition.at is None else f"{condition.name}@{condition.at}"
    found = next((each for each in figures if each.name == name), None)
    difference = None if found is None else found.differences[index - 1]
    if found is None or difference is None or difference.change is None:
        missing = runs[0].report.id if difference is None or difference.before is None else run.id
        text = f"{name} is not known of {missing}{nearest(name, [each.name for each in figures])}"
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=text)
    if difference.interval is None and found.name in WITH_INTERVAL:
        text = f"{name}: too few steps for an interval ({MIN_VALUES} blocks after the warm-up are needed)"
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=text)
    shown = change_text(difference, relative=found.relative)
    exceeded = _exceeds(condition, difference.change, difference.interval)
    alone = _exceeds(condition, difference.change, difference.undisturbed_interval or difference.interval)
    if not (exceeded and alone):
        beyond = (difference.change - condition.limit) * condition.sign > 0
        why = "within its interval" if beyond else "within the limit"
        if exceeded:
            why = "by waits for cores that other processes used"
        return Limit(condition=condition.text, run=run.id, exceeded=False, text=f"{name} {shown}: {why}")
    blamed = _largest_phase(figures, index) if name in ("step_ms", "throughput", "steps_per_s") else ""
    return Limit(condition=condition.text, run=run.id, exceeded=True, text=f"{name} {shown}{blamed}")


def _exceeds(condition: Condition, change: float, interval: Interval | None) -> bool:
    """Whether a change is beyond the limit, with its whole interval where it has one."""
    end = change if interval is None else interval[0 if condition.sign > 0 else 1]
    return (end - condition.limit) * condition.sign > 0


def _largest_phase(figures: Sequence[FigureComparison], index: int) -> str:
    """Return the phase that has grown most, with its milliseconds; where all have shrunk, that which has least."""
    grown: dict[str, float] = {}
    for figure in figures:
        phase = figure.name.removesuffix("_ms")
        difference = figure.differences[index - 1]
        if phase in PHASES and difference.now is not None:
            grown[phase] = difference.now - (difference.before or 0.0)
    if not grown:
        return ""
    phase = max(grown, key=lambda each: grown[each])
    return f", most by {phase} ({grown[phase]:+.1f} ms)"


def _finding_limit(condition: Condition, before: RunReport, now: RunReport) -> Limit:
    def standing(report: RunReport) -> list[str]:
        return [each.message for each in report.findings if each.kind == condition.finding and each.cleared is None]

    new = standing(now)
    exceeded = bool(new) and not standing(before)
    text = new[0] if new else f"no {condition.finding} stands"
    return Limit(condition=condition.text, run=now.id, exceeded=exceeded, text=text)


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
