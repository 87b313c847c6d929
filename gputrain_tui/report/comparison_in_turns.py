"""Comparison of two kinds of runs made in turns: how the rounds differ from each other is the noise. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import exp, expm1, log, log1p, sqrt
from statistics import NormalDist, fmean, stdev

from msgspec.structs import replace

from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.report.run_comparison import Difference, RecordedRun, RunComparison, compare, difference_of
from gputrain_tui.report.step_blocks import Interval

MIN_ROUNDS = 3
"""Of two rounds an interval is so wide (12.7 standard errors on each side) that nothing lies beyond it."""
Round = tuple[RecordedRun, RecordedRun]


def compare_in_turns(
    rounds: Sequence[Round], *, recipe: Sequence[DifferingValues] = (), loss_steps: Iterable[int] = ()
) -> RunComparison:
    """Compare the second run of each round with its first, and take the mean over the rounds.

    ``rounds``: ``MIN_ROUNDS`` or more, oldest first. ``recipe``: keys that differ, with the values of all runs in the
    order of the rounds. What holds up both runs of a round alike, such as another user of the machine, is in none of
    the differences; what holds up one of them makes the interval wider.
    """
    steps = tuple(loss_steps)
    found = [compare(pair, loss_steps=steps, intervals=False) for pair in rounds]
    newest = found[-1]
    figures = []
    for figure in newest.figures:
        of_rounds = [same.differences[0] for each in found for same in each.figures if same.name == figure.name]
        if len(of_rounds) == len(rounds):
            mean = _over_rounds(of_rounds, relative=figure.relative)
            figures.append(replace(figure, differences=(mean,)))
    return RunComparison(
        runs=newest.runs,
        rounds=tuple(each.runs for each in found),
        recipe=tuple(replace(each, values=each.values[-2:]) for each in recipe if len({*each.values[-2:]}) > 1),
        versions=newest.versions,
        steps=newest.steps,
        incomparable=tuple(dict.fromkeys([*(why for each in found for why in each.incomparable), *_changed(recipe)])),
        nan_since=newest.nan_since,
        figures=tuple(figures),
    )


def _changed(recipe: Sequence[DifferingValues]) -> Iterator[str]:
    """Yield the keys that changed from round to round in one of both kinds only, which is then not one kind."""
    for each in recipe:
        before, now = each.values[::2], each.values[1::2]
        if before != now and (len({*before}) > 1 or len({*now}) > 1):
            yield f"{each.key} is not the same in all rounds"


def _over_rounds(differences: Sequence[Difference], *, relative: bool) -> Difference:
    changes = [each.change for each in differences if each.change is not None]
    before, now = (
        _mean(values, relative=relative) if len(values) == len(differences) else None
        for values in (
            [each.before for each in differences if each.before is not None],
            [each.now for each in differences if each.now is not None],
        )
    )
    if before is None or now is None or len(changes) < len(differences):
        return Difference(before=before, now=now)
    # The logarithm of a ratio changes its sign, not its size, when both are exchanged; of a ratio of 0 there is none.
    if relative and min(changes) > -1:
        logarithms = [log1p(change) for change in changes]
        low, high = mean_interval(logarithms)
        return difference_of(before, now, expm1(fmean(logarithms)), (expm1(low), expm1(high)))
    return difference_of(before, now, fmean(changes), mean_interval(changes))


def _mean(values: Sequence[float], *, relative: bool) -> float:
    """Return the mean over the rounds; of what is compared by ratios the geometric one, whose ratio is the change."""
    return exp(fmean(map(log, values))) if relative and min(values) > 0 else fmean(values)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of three or more independent values, by Student's t distribution."""
    middle, half = fmean(values), student_t_975(len(values) - 1) * stdev(values) / sqrt(len(values))
    return middle - half, middle + half


def student_t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with two or more degrees of freedom, within 0.2 %.

    Expansion of Fisher and Cornish (Abramowitz & Stegun 26.7.5), which for two degrees is 0.8 % too low.
    """
    if freedom == 2:
        return 4.3027
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
