"""Compare the options of all ranks: values that must be equal on every rank before they train together.

DDP compares shapes only: ranks with different learning rates, batch sizes or data files would train without an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from trainer.contract.errors import RequestError
from trainer.distributed.collectives import all_gather_list


class RankRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Options and other values with which one rank was started."""

    rank: int
    process: str
    """Process of the rank, for a message: ``pid 7 on host``."""
    values: dict[str, str]
    """Values by the name used in messages, such as ``--lr``."""


def disagreement(first: RankRequest, second: RankRequest) -> str:
    """Return one line with the values in which two ranks differ, by rank and host; empty if they agree."""
    low, high = sorted((first, second), key=lambda request: request.rank)
    names = [name for name in {**low.values, **high.values} if low.values.get(name) != high.values.get(name)]
    if not names:
        return ""
    named = 3  # differing values listed in a refusal; the rest is counted
    differences = [
        f"{name}: {_shown(low, name)} on rank {low.rank} ({low.process}), "
        f"{_shown(high, name)} on rank {high.rank} ({high.process})"
        for name in names[:named]
    ]
    more = f"; and {len(names) - named} more" if len(names) > named else ""
    return f"ranks have different settings: {'; '.join(differences)}{more}"


def require_same(values: Mapping[str, str]) -> None:
    """Require equal values on all ranks of the group; a collective, and every rank raises the same message.

    Raises:
        RequestError: values differ; one line names the ranks, their hosts, the value's name and both values.
    """
    own = f"pid {os.getpid()} on {socket.gethostname()}"
    rows = all_gather_list((own, dict(values)))
    requests = [RankRequest(rank=rank, process=process, values=held) for rank, (process, held) in enumerate(rows)]
    for request in requests[1:]:
        if refusal := disagreement(requests[0], request):
            raise RequestError(refusal)


def _shown(request: RankRequest, name: str) -> str:
    value = request.values.get(name, "none")
    # Maximum characters of a value in a refusal: enough for a path, too few for a list of a thousand batch sizes.
    longest = 120
    return value if len(value) <= longest else f"{value[: longest - 1]}…"
