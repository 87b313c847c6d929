"""Ranks that still have data, where a script trains on uneven inputs in DDP's ``join()``.

DDP divides gradients by their number, unless ``divide_by_initial_world_size`` is set or a comm hook averages. DDP hands
the collective that counts them to its reducer, which does not expose it; so it is kept here when it is issued.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

_counting: WeakKeyDictionary[DistributedDataParallel, Any] = WeakKeyDictionary()
"""By model, the work of the collective that counts the ranks of its last forward pass."""


def follow_joins() -> None:
    """Patch torch's ``Join`` to keep the collectives that count ranks."""
    original = Join.notify_join_context
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def notify_join_context(joinable: Any) -> Any:
        work = original(joinable)
        if work is not None and isinstance(joinable, DistributedDataParallel):
            _counting[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify_join_context)  # type: ignore[method-assign]


def ranks_with_data(model: DistributedDataParallel) -> int | None:
    """Return the number of ranks by which DDP divides a gradient now; None where that is the world size."""
    if not model._join_config.enable or model._divide_by_initial_world_size:
        return None
    work = _counting.get(model)
    if work is None:  # of several models in one context only the first one counts
        return None
    work.wait()
    counted = work.get_future().value()
    return int((counted[0] if isinstance(counted, list) else counted).item())


def matches_others(model: DistributedDataParallel) -> bool:
    """Return whether this rank has no more data, and only takes part in the synchronisations of ranks that have."""
    return model._join_config.enable and torch._C._current_graph_task_id() == -1  # in no backward pass
