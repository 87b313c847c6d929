"""Medians and spreads that a few outliers do not move, cheap enough for a thousand ranks at every check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def median(values: Sequence[float]) -> float:
    """Return the median; the mean of the two in the median where their number is even."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the half in the median: a few odd values do not move it, what comes now and then does."""
    ordered = sorted(values)
    kept = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return sum(kept) / len(kept)


def median_low(values: Sequence[float]) -> float:
    """Return the median; the lower of the two in the median where their number is even."""
    return sorted(values)[(len(values) - 1) // 2]


def median_without(ranked: Sequence[float], place: int) -> float:
    """Return the median of ascending values but for the one at a place."""
    others = len(ranked) - 1
    low, high = (others - 1) // 2, others // 2
    return (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2


def excess(values: Sequence[float]) -> list[float]:
    """Return each value minus the median of the others; 0 for a single one."""
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


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which about this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation as the median absolute deviation tells it, deaf to outliers."""
    about = median(values)
    return 1.4826 * median([abs(value - about) for value in values])


def jitter(values: Sequence[float]) -> float:
    """Return the standard deviation from one step to the next, deaf to outliers and to a level that shifts."""
    return 1.4826 * median([abs(b - a) for a, b in pairwise(values)]) / math.sqrt(2)
