"""Conditions on the differences between runs, such as ``step_ms>+5%``, and whether they are exceeded. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from gputrain_tui.diagnosis import KINDS, OTHER_KINDS
from gputrain_tui.history.run_columns import METRIC
from gputrain_tui.report.run_comparison import (
    LOSSES,
    SINGLE,
    STEP_LOSSES,
    WITH_INTERVAL,
    Difference,
    FigureComparison,
    Limit,
    RecordedRun,
    RunComparison,
    block_steps,
    change_text,
)
from gputrain_tui.report.step_blocks import MIN_VALUES, Interval, block_sums
from gputrain_tui.state.figures import mean_step_ms
from gputrain_tui.state.totals import PHASES
from trainer.contract.errors import RequestError, nearest, quoted

Pair = tuple[RecordedRun, RecordedRun]
"""A run and the one that it is compared with, which is first."""


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


ENDING_LOSSES = (*STEP_LOSSES, "valid")
"""Losses that a run which ended in NaN does not have, whatever they were before; its best validation it has."""
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
        if kind not in (known := KINDS | OTHER_KINDS):
            hint = nearest(kind, sorted(known)) or "; `gputrain help findings` lists them"
            raise RequestError(f"--fail-on {quoted(text)}: name a kind of finding, such as finding:straggler{hint}")
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
            ", loss@STEP, metric:NAME, and finding:KIND without a limit"
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
    return Condition(text=text, name=name, at=None if match["at"] is None else int(match["at"]), sign=sign, limit=limit)


def check_limits(
    comparison: RunComparison, runs: Sequence[RecordedRun], conditions: Sequence[Condition]
) -> RunComparison:
    """Return the comparison of the runs with the conditions checked on each run after the first."""
    checked = [
        _checked(condition, comparison.figures, index, [(runs[0], run)])
        for index, run in enumerate(runs[1:])
        for condition in conditions
    ]
    return replace(comparison, limits=tuple(checked))


def check_limits_in_turns(
    comparison: RunComparison, rounds: Sequence[Pair], conditions: Sequence[Condition]
) -> RunComparison:
    """Return the comparison of the rounds with the conditions checked on their means."""
    checked = [_checked(condition, comparison.figures, 0, rounds) for condition in conditions]
    return replace(comparison, limits=tuple(checked))


def _checked(condition: Condition, figures: Sequence[FigureComparison], index: int, rounds: Sequence[Pair]) -> Limit:
    """Check a condition on the figures' differences of this index, which are those of the rounds."""
    run = rounds[-1][1].report
    if condition.name == "finding":
        return _finding_limit(condition, rounds)
    name = condition.name if condition.at is None else f"{condition.name}@{condition.at}"
    if condition.name in ENDING_LOSSES and (limit := _nan_limit(condition, rounds)) is not None:
        return limit
    found = next((each for each in figures if each.name == name), None)
    if found is None:
        text = _not_known(condition, name, rounds[-1], None, nearest(name, [each.name for each in figures]))
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=text)
    difference = found.differences[index]
    if difference.change is None:
        text = _not_known(condition, name, rounds[-1], difference, "")
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=text)
    if difference.interval is None and found.name in WITH_INTERVAL:
        text = f"{name}: too few steps for an interval ({MIN_VALUES} blocks after the warm-up are needed)"
        return Limit(condition=condition.text, run=run.id, exceeded=None, text=text)
    shown = change_text(difference, relative=found.relative)
    measured = _exceeds(condition, difference.change, difference.interval)
    alone = _exceeds(condition, difference.change, difference.undisturbed_interval or difference.interval)
    if measured is None or alone is not measured:
        why = _undecided(condition, difference, rounds, measured)
        return Limit(condition=condition.text, run=run.id, exceeded=False, decided=False, text=f"{name} {shown}: {why}")
    if not measured:
        return Limit(condition=condition.text, run=run.id, exceeded=False, text=f"{name} {shown}: within the limit")
    blamed = _largest_phase(figures, index) if name in ("step_ms", "throughput", "steps_per_s") else ""
    return Limit(condition=condition.text, run=run.id, exceeded=True, text=f"{name} {shown}{blamed}")


def _not_known(condition: Condition, name: str, pair: Pair, difference: Difference | None, guess: str) -> str:
    """Return of which run a figure is not known, and why, or else the ``guess`` at its name."""
    before, now = pair
    lacking = [each for each in pair if condition.at is not None and not each.blocks.has(condition.at)]
    anew = [each for each in pair if each.counts_anew and condition.name in STEP_LOSSES]
    missing, hint = before if difference is None or difference.before is None else now, guess
    if anew:
        missing, hint = anew[0], ": its script was started again, and each start counts its steps from 1"
    elif lacking:
        missing = lacking[0]
        hint = f", whose steps are {missing.blocks.first_step:,} to {missing.blocks.last_step:,}"
    elif name in STEP_LOSSES and before.blocks.first_step != now.blocks.first_step:
        hint = ": what a resumed run had seen before is not in its record"
    return f"{name} is not known of {missing.report.id}{hint}"


def _nan_limit(condition: Condition, rounds: Sequence[Pair]) -> Limit | None:
    """Return the limit on a loss where that of a run is NaN or infinite: beyond any limit; None where all are numbers.

    Only the run whose loss it is exceeds the limit: against one that ended so any number is within it, but over rounds
    no mean is known.
    """
    without = [[run for run in runs if not run.has_loss_at(condition.at)] for runs in zip(*rounds, strict=True)]
    if not any(without):
        return None
    told = (
        f"the loss of {run.report.id} is NaN or infinite since step {run.nan_since:,}"
        for runs in without
        for run in runs
    )
    text = "; ".join(dict.fromkeys(told))
    exceeded = True if not without[0] else None if without[1] or len(rounds) > 1 else False
    return Limit(condition=condition.text, run=rounds[-1][1].report.id, exceeded=exceeded, text=text)


def _exceeds(condition: Condition, change: float, interval: Interval | None) -> bool | None:
    """Whether a change is beyond the limit, with its whole interval where it has one; None: only a part of it is."""
    ends = {(end - condition.limit) * condition.sign > 0 for end in interval or (change,)}
    return None if len(ends) > 1 else ends.pop()


def _undecided(condition: Condition, difference: Difference, rounds: Sequence[Pair], measured: bool | None) -> str:
    """Return why it cannot be told whether a limit is exceeded, and what would tell it."""
    assert difference.change is not None
    if measured is not None:
        shares = [f"{100 * _waited_share(run):.0f} %" for run in rounds[-1]]
        return (
            f"cannot be told, as ranks waited for cores that other processes used, {shares[0]} of the time before and "
            f"{shares[1]} now"
        )
    assert difference.interval is not None
    # The interval's width falls as the root of the number of steps, or of rounds.
    distance = abs(difference.change - condition.limit)
    width = max(abs(end - difference.change) for end in difference.interval)
    what = "steps" if len(rounds) == 1 else "rounds"
    count = min(run.report.step or 0 for run in rounds[0]) if what == "steps" else len(rounds)
    times = (width / distance) ** 2 if distance else inf
    needed = f"about {float(f'{times * count:.2g}'):,.0f} {what}" if times < 100 else f"over 100 times as many {what}"
    return f"cannot be told at this noise; it would take {needed}"


def _waited_share(run: RecordedRun) -> float:
    whole, alone = (
        sum(ms for ms, _ in block_sums(blocks.after_warm_up(), mean_step_ms, block_steps))
        for blocks in (run.blocks, run.undisturbed)
    )
    return 1 - alone / whole if whole else 0.0


def _largest_phase(figures: Sequence[FigureComparison], index: int) -> str:
    """Return the phase that has grown most, with its milliseconds; where all have shrunk, that which has least."""
    grown: dict[str, float] = {}
    for figure in figures:
        phase = figure.name.removesuffix("_ms")
        difference = figure.differences[index]
        if phase in PHASES and difference.now is not None:
            grown[phase] = difference.now - (difference.before or 0.0)
    if not grown:
        return ""
    phase = max(grown, key=lambda each: grown[each])
    return f", most by {phase} ({grown[phase]:+.1f} ms)"


def _finding_limit(condition: Condition, rounds: Sequence[Pair]) -> Limit:
    """A finding is new where it is that of the later run alone, in more than half of the rounds.

    Besides those that stand, the one counts that stood for most steps and limits the run.
    """

    def standing(run: RecordedRun) -> list[str]:
        found, verdict = run.report.findings, run.report.verdict
        stands = [each.message for each in found if each.kind == condition.finding and each.cleared is None]
        return stands or [verdict.text] * (verdict.kind == condition.finding)

    messages = [message for _, now in rounds for message in standing(now)[:1]]
    new = sum(1 for before, now in rounds if standing(now) and not standing(before))
    text = messages[-1] if messages else f"no {condition.finding} stands"
    if len(rounds) > 1 and messages:
        text += f" (in {len(messages)} of {len(rounds)} rounds)"
    return Limit(condition=condition.text, run=rounds[-1][1].report.id, exceeded=2 * new > len(rounds), text=text)
