"""The numbers of the events.

Numbers have bounds, checked on reading: a larger number in a damaged line could exhaust a reader's memory or overflow.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

MAX_RANKS = 1 << 16
"""Maximum ranks of a run: 64 nodes with the 1024 ranks that a recipe allows per node; their state fits in memory."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
"""Number of a rank, or index of a node, of which there are at most as many."""
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A whole number that a double holds exactly."""
StepNumber = Annotated[int, Meta(ge=1, le=1 << 53)]
"""Optimizer steps done, from 1."""
StepsCovered = Annotated[int, Meta(ge=1, le=1 << 24)]
"""Number of steps that one event covers; the widest block of the fastest steps has 8 million."""
MAX_NUMBER = 1e100
FiniteFloat = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""A measured or computed number; bounds far beyond single precision, within which sums stay finite."""
if TYPE_CHECKING:
    Result = float
else:
    Result = FiniteFloat | None
"""A result that is always measured, but may be no number: NaN, which is null in JSON."""
UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
"""Unix time until the year 5138, which every calendar function accepts."""
ExitStatus = Annotated[int, Meta(ge=-255, le=255)]
"""An exit code, or a signal's number negated."""


def or_nan(value: float | None) -> float:
    """Return the number; NaN for null, and for a number that readers would refuse."""
    return value if value is not None and abs(value) <= MAX_NUMBER else nan
