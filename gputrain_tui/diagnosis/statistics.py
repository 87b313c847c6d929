"""Robust statistics, cheap enough for a thousand ranks at every check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def midmean(values: Sequence[float]) -> float:
    """Return the interquartile mean: outliers do not move it, but values in a third of the samples do."""
    ordered = sorted(values)
    kept = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return sum(kept) / len(kept)


def median_without(ranked: Sequence[float], index: int) -> float:
    """Return the median of ascending values without the one at an index."""
    others = len(ranked) - 1
    low, high = (others - 1) // 2, others // 2
    return (ranked[low + (low >= index)] + ranked[high + (high >= index)]) / 2


def excess(values: Sequence[float]) -> list[float]:
    """Return each value minus the median of the others; 0 for a single value."""
    count = len(values)
    if count < 2:
        return [0.0] * count
    ranked = sorted(values)
    # The median of the others depends only on the side of the median on which a value lies.
    pivot = ranked[(count - 1) // 2]
    below = median_without(ranked, 0)
    at = median_without(ranked, (count - 1) // 2)
    above = median_without(ranked, count - 1)
    return [value - (below if value < pivot else at if value == pivot else above) for value in values]


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile: about a quarter of the values is smaller."""
    return sorted(values)[len(values) // 4]


def spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation, from the median absolute deviation (1.4826 for normal values)."""
    about = median(values)
    return 1.4826 * median([abs(value - about) for value in values])


def jitter(values: Sequence[float]) -> float:
    """Return a robust standard deviation of the noise, from successive differences: a shifting level has no effect.

    The interquartile mean of the differences (0.693 for normal values), as their median may be 0 where values jump
    between two levels.
    """
    return midmean([abs(b - a) for a, b in pairwise(values)]) / 0.693 / math.sqrt(2)
