"""The shares of the global batch that the ranks have: how they changed, why, what was expected of it and what came."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from gputrain_tui.state.rank_state import KEPT, RankView
from trainer.contract.balanced_shares import ComputeTime
from trainer.contract.record import ShareChange

CAUSES = {
    "start": "equal at the start",
    "learned": "by speeds that earlier runs measured",
    "measured": "by measured speeds",
    "memory": "a rank ran out of memory",
    "resumed": "as before the start",
    "recorded": "as another run recorded them",
}
"""Causes of a change in words."""


class SharesFromStep(msgspec.Struct, frozen=True, kw_only=True):
    """The shares that the ranks have from a step on."""

    step: int
    """The first with them."""
    shares: tuple[int, ...]
    """Samples of each rank, or tokens, of the global batch."""
    cause: str
    """As in the record's event ``shares``."""
    text: str
    """The change in a line."""


class ShareChanges:
    """The changes of a run, the oldest first; none where shares are not balanced."""

    def __init__(self) -> None:
        self.changes: deque[ShareChange] = deque(maxlen=KEPT)

    def add(self, event: ShareChange, ranks: Mapping[int, RankView]) -> None:
        """Take a change, or one again with what was measured after it; give each rank its share and its fit."""
        if self.changes and self.changes[-1].step == event.step and event.measured_ms is not None:
            self.changes.pop()
        self.changes.append(event)
        fits = list(zip(event.fixed_ms or (), event.per_sample_ms or (), strict=False))
        for rank, view in ranks.items():
            view.share = event.shares[rank] if rank < len(event.shares) else None
            if rank < len(fits):
                view.fit = ComputeTime(*fits[rank])

    @property
    def newest(self) -> ShareChange | None:
        return self.changes[-1] if self.changes else None

    def described(self) -> tuple[SharesFromStep, ...]:
        """Return the newest changes with their texts, the oldest first."""
        most = 64  # so that those of 1,024 ranks take a small part of a page
        return tuple(
            SharesFromStep(step=each.step, shares=tuple(each.shares), cause=each.cause, text=change_text(each))
            for each in list(self.changes)[-most:]
        )


def shares_text(shares: Sequence[int]) -> str:
    """Return ``48, 16``, or ``16 to 48 on 64 ranks``."""
    most = 8  # more do not fit into a line
    if len(shares) <= most:
        return ", ".join(map(str, shares))
    return f"{min(shares):,} to {max(shares):,} on {len(shares):,} ranks"


def change_text(change: ShareChange) -> str:
    """Return a change in a line: new and old shares, the cause, and the compute of the slowest rank."""
    before = f" instead of {shares_text(change.previous)}" if change.previous and change.cause != "resumed" else ""
    text = f"shares {shares_text(change.shares)} from step {change.step:,} on{before}: {CAUSES[change.cause]}"
    return "; ".join(filter(None, [text, gain_text(change)]))


def gain_text(change: ShareChange) -> str:
    """Return what a change was expected to bring and, once that is known, what it has brought; empty for neither."""
    earlier = "" if change.slowest_ms is None else f" instead of {change.slowest_ms:.1f} ms"
    expected = "" if change.expected_ms is None else f"{change.expected_ms:.1f} ms"
    if change.measured_ms is not None:
        hoped = f" ({expected} expected)" if expected else ""
        return f"the slowest rank computes {change.measured_ms:.1f} ms{earlier}{hoped}"
    return f"the slowest rank should compute {expected}{earlier}" if expected else ""
