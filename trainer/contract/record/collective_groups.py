"""Collectives of a rank by process group: which groups it is in, and what it waits for in each."""

from __future__ import annotations

import msgspec

from trainer.contract.record.numbers import Count, FiniteFloat

MAX_GROUPS = 16
"""Maximum process groups of a rank that are told apart; the collectives of further ones count to ``OTHER_GROUPS``."""
OTHER_GROUPS = "other groups"


class GroupSync(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Collectives of one group in a step; means over the covered steps."""

    group: str
    """Name of a ``CollectiveGroup`` of this rank."""
    calls: FiniteFloat
    bytes: FiniteFloat = 0.0
    """Of this rank's inputs, for an ``all_gather`` of its output."""
    exposed_ms: FiniteFloat | None = None
    """Time for which the rank was blocked, in the call or in waiting for its result; on a GPU the time for which the
    waiting stream was. None where it was not measured."""
    total_ms: FiniteFloat | None = None
    """Sum of the times from each call to the end of the wait for it."""
    operations: dict[str, FiniteFloat] = {}
    """Calls by operation, such as ``all_gather``."""
    operation_exposed_ms: dict[str, FiniteFloat] = {}
    """``exposed_ms`` by operation, where the group has several."""


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call, in the newest steps of a rank whose calls are recorded one by one."""

    group: str
    operation: str
    bytes: Count
    start_ms: FiniteFloat
    """Since the start of the step."""
    total_ms: FiniteFloat
    exposed_ms: FiniteFloat
