"""Runs against a first one, as data: differences with their intervals, and conditions on them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite

import msgspec
from msgspec.structs import replace

from gputrain_tui.history.comparison import ValueDifference
from gputrain_tui.history.step_axis import AxisName, StepAxis
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
    axis: StepAxis
    """Samples and times at which its steps ended."""


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
    """As in conditions."""
    title: str
    """In words, such as ``loss at step 1,000``."""
    unit: str
    relative: bool
    differences: tuple[Difference, ...]
    """One for each run after the first."""


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
    recipe: tuple[ValueDifference, ...] = ()
    versions: tuple[ValueDifference, ...] = ()
    """Programs whose versions differ; several versions of a run's hosts stand beside each other."""
    incomparable: tuple[str, ...] = ()
    """Why the speed of the runs cannot be compared: other hardware or ranks, or no steps."""
    figures: tuple[FigureComparison, ...] = ()
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Figure:
    """How a figure is taken from the sums of a block's ranks."""

    name: str
    title: str
    unit: str
    of: Measure


def _loss(block: Sequence[Totals]) -> float | None:
    steps = sum(sums.loss_steps for sums in block)
    return sum(sums.loss for sums in block) / steps if steps else None


SPEEDS = (
    Figure("step_ms", "step", "ms", mean_step_ms),
    *(Figure(f"{phase}_ms", phase, "ms", partial(mean_phase_ms, phase=phase)) for phase in PHASES),
    Figure("throughput", "throughput", "samples/s", samples_per_s),
    Figure("steps_per_s", "steps", "steps/s", steps_per_s),
)
"""Figures over the steps after the warm-up, by relative difference."""
WITH_INTERVAL = tuple(figure.name for figure in SPEEDS)
SINGLE = ("peak_memory", "loss", "valid")
"""Further names of conditions."""
LOSS_AXES: dict[str, AxisName] = {"": "step", "samples": "samples", "s": "time"}
"""What a loss may be compared at: its suffix behind a number, such as ``loss@600s``, and the axis of the steps."""
COMMON_LOSSES = ("loss", "loss@samples", "loss@s")
"""Losses at the last step, sample and second that all runs have reached."""
METRIC = "metric:"


def compare(
    runs: Sequence[RecordedRun], *, recipe: Sequence[ValueDifference] = (), conditions: Sequence[Condition] = ()
) -> RunComparison:
    """Compare each run with the first."""
    figures = [_speed(figure, runs) for figure in SPEEDS]
    losses = {each.name: None for each in conditions if each.name.startswith("loss@")}
    figures += [_losses(name, runs) for name in dict.fromkeys((*COMMON_LOSSES, *losses))]
    figures.append(_single("valid", "validation loss", runs, _valid))
    figures.append(_single("peak_memory", "peak memory", runs, _peak_memory, bytes=True))
    for name in dict.fromkeys(name for run in runs for name in run.report.metrics):
        figures.append(_single(METRIC + name, name, runs, partial(_metric, name=name)))
    known = tuple(each for each in figures if any(d.before is not None or d.now is not None for d in each.differences))
    return RunComparison(
        runs=tuple(run.report.id for run in runs),
        recipe=tuple(recipe),
        versions=tuple(version_differences([run.report for run in runs])),
        incomparable=tuple(incomparable([run.report for run in runs])),
        figures=known,
        limits=tuple(
            _checked(condition, known, runs, index) for index in range(1, len(runs)) for condition in conditions
        ),
    )


def version_differences(reports: Sequence[RunReport]) -> list[ValueDifference]:
    """Return the programs whose versions differ between runs that have recorded theirs."""
    names = {name: None for report in reports for each in report.software for name in each.versions}
    rows = []
    for name in names:
        texts = [", ".join(sorted({each.versions.get(name, "–") for each in of.software})) for of in reports]
        if len({text for text in texts if text}) > 1:
            rows.append(ValueDifference(key=name, values=tuple(texts)))
    return rows


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
    return FigureComparison(name=figure.name, title=figure.title, unit=figure.unit, relative=True, differences=changes)


def _losses(name: str, runs: Sequence[RecordedRun]) -> FigureComparison:
    """Compare the losses around a step, a number of samples or a time, each the mean of the blocks near it."""
    match = LOSS.fullmatch(name)
    assert match is not None
    axis = LOSS_AXES[match["axis"] or ""]
    if match["at"]:
        at = float(match["at"])
    elif axis == "step":
        at = min(run.blocks.last_step for run in runs)
    else:
        at = min(run.axis.at(axis, run.axis.last_step) if run.axis.has(axis) else inf for run in runs)
    values = []
    for run in runs:
        step = at if axis == "step" else run.axis.step_at(axis, at)
        values.append([] if step is None else block_values(run.blocks.around(max(round(step), 1)), _loss))
    changes = tuple(_difference(values[0], other, relative=False) for other in values[1:])
    unit = next((run.report.loss_unit for run in runs if run.report.loss_unit), "")
    where = {"step": f"at step {at:,.0f}", "samples": f"at {at:,.0f} samples", "time": f"after {at:,.0f} s of training"}
    return FigureComparison(name=name, title=f"loss {where[axis]}", unit=unit, relative=False, differences=changes)


def _difference(before: Sequence[float], now: Sequence[float], *, relative: bool) -> Difference:
    if not before or not now:
        return Difference(before=mean(before) if before else None, now=mean(now) if now else None)
    one, other = mean(before), mean(now)
    change = None if relative and not one else other / one - 1 if relative else other - one
    interval = difference_interval(before, now, relative=relative)
    beyond = interval is not None and not interval[0] <= 0 <= interval[1]
    return Difference(before=one, now=other, change=change, interval=interval, beyond_noise=beyond)


def _single(
    name: str, title: str, runs: Sequence[RecordedRun], of: Callable[[RunReport], float | None], *, bytes: bool = False
) -> FigureComparison:
    """Compare single numbers: by their difference, bytes by the relative one."""
    first, *others = [of(run.report) for run in runs]
    return FigureComparison(
        name=name,
        title=title,
        unit="bytes" if bytes else "",
        relative=bytes,
        differences=tuple(_single_difference(first, other, relative=bytes) for other in others),
    )


def _single_difference(before: float | None, now: float | None, *, relative: bool) -> Difference:
    if before is None or now is None or (relative and not before):
        return Difference(before=before, now=now)
    change = now / before - 1 if relative else now - before
    return Difference(before=before, now=now, change=change, beyond_noise=change != 0)


def _valid(report: RunReport) -> float | None:
    return next((each.loss for each in reversed(report.validations) if each.split == "valid"), None)


def _metric(report: RunReport, *, name: str) -> float | None:
    return report.metrics.get(name)


def _peak_memory(report: RunReport) -> float | None:
    peaks = [rank.memory_peak_bytes for rank in report.ranks if rank.memory_peak_bytes is not None]
    return float(max(peaks)) if peaks else None


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition of ``--fail-on``, such as ``step_ms>+5%`` or ``finding:straggler``."""

    text: str
    name: str
    """A figure, or ``finding``."""
    sign: int = 1
    """1: more fails, -1: less."""
    limit: float = 0.0
    """Of the change: relative, or absolute for a loss."""
    finding: str = ""


LIMIT = r"\s*(?P<sign>[<>])\s*(?P<limit>[+-]?\d+(?:\.\d+)?)\s*(?P<percent>%?)\s*"
PATTERN = re.compile(rf"\s*(?P<name>metric:.+?|[a-z_]+(?:@\w+)?){LIMIT}")
LOSS = re.compile(r"loss(?:@(?P<at>\d+)?(?P<axis>samples|s)?)?(?<!@)")


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
    match = PATTERN.fullmatch(text)
    if match is None:
        raise RequestError(
            f"--fail-on {quoted(text)} is no condition: write FIGURE>+LIMIT or FIGURE<-LIMIT, such as 'step_ms>+5%', "
            "'throughput<-5%', 'loss@1000>+0.02', 'metric:NAME<-0.01', or finding:KIND"
        )
    name, sign = match["name"], 1 if match["sign"] == ">" else -1
    figure, _, at = name.partition("@")
    is_metric = name.startswith(METRIC)
    names = [*WITH_INTERVAL, *SINGLE]
    if figure not in names and not is_metric:
        raise RequestError(
            f"--fail-on {quoted(text)}: {quoted(figure)} is no figure{nearest(figure, names)}; they are "
            f"{', '.join(names)}, and metric:NAME"
        )
    if at and not is_metric and not LOSS.fullmatch(name):
        raise RequestError(
            f"--fail-on {quoted(text)}: only a loss is taken at a point: loss@1000 (a step), loss@50000samples, "
            "loss@600s, or where all runs have come to: loss@samples, loss@s"
        )
    absolute = is_metric or figure in ("loss", "valid")
    if bool(match["percent"]) == absolute:
        unit = "an absolute limit, such as +0.02" if absolute else "a limit in percent, such as +5%"
        raise RequestError(f"--fail-on {quoted(text)}: {name if is_metric else figure} takes {unit}")
    limit = float(match["limit"]) / (1 if absolute else 100)
    if limit * sign < 0:
        raise RequestError(f"--fail-on {quoted(text)}: > takes a limit of 0 or more, < one of 0 or less")
    return Condition(text=text, name=name, sign=sign, limit=limit)


def _checked(
    condition: Condition, figures: Sequence[FigureComparison], runs: Sequence[RecordedRun], index: int
) -> Limit:
    run = runs[index].report
    if condition.name == "finding":
        return _finding_limit(condition, runs[0].report, run)
    name = condition.name
    found = next((each for each in figures if each.name == name), None)
    difference = None if found is None else found.differences[index - 1]
    if found is None or difference is None or difference.change is None:
        missing = runs[0].report.id if difference is None or difference.before is None else run.id
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=f"{name} is not known of {missing}")
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
