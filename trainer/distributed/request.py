"""Compares what the ranks were asked for: values that must be equal on all of them before they train together.

DDP compares shapes and no more: ranks with another learning rate, batch size or data file would train on, and end well.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from trainer.contract.errors import RequestError
from trainer.distributed.collectives import all_gather_list

NAMED = 3
"""Values that a refusal names; a person mends the first and reads the next line."""
LONGEST = 120
"""Characters of a value in a refusal: a path is whole, a list of a thousand batch sizes is not."""
ABSENT = "none"


class RankRequest(msgspec.Struct, kw_only=True, frozen=True):
    """What one rank was asked for."""

    rank: int
    whom: str
    """The process, for a message: ``pid 7 on host``."""
    values: dict[str, str]
    """By the name that a person knows them by, such as ``--lr``."""


def disagreement(one: RankRequest, other: RankRequest) -> str:
    """Return in one line the values in which two ranks differ, by rank and host; empty where there are none."""
    low, high = sorted((one, other), key=lambda request: request.rank)
    names = [name for name in {**low.values, **high.values} if low.values.get(name) != high.values.get(name)]
    if not names:
        return ""
    told = [
        f"{name}: {_shown(low, name)} on rank {low.rank} ({low.whom}), "
        f"{_shown(high, name)} on rank {high.rank} ({high.whom})"
        for name in names[:NAMED]
    ]
    more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"ranks are asked for different things: {'; '.join(told)}{more}"


def require_same(values: Mapping[str, str]) -> None:
    """Require that all ranks of the group hold equal values; every rank takes part and refuses in the same words.

    Raises:
        RequestError: one line that names the ranks, their hosts, the value's name and both values.
    """
    whom = f"pid {os.getpid()} on {socket.gethostname()}"
    rows = all_gather_list((whom, dict(values)))
    requests = [RankRequest(rank=rank, whom=whom, values=held) for rank, (whom, held) in enumerate(rows)]
    for other in requests[1:]:
        if different := disagreement(requests[0], other):
            raise RequestError(different)


def _shown(request: RankRequest, name: str) -> str:
    value = request.values.get(name, ABSENT)
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"
