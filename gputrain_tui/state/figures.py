"""Figures of a whole run, from the states of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gputrain_tui.state.rank import RankView


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of a whole run; None: not measured."""

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    """Mean of the ranks' newest losses, nats."""
    samples_per_s: float | None = None
    """Of all ranks together, over their last events."""
    compute_share: float | None = None
    """Share of step time in which the ranks computed: forward, backward and optimizer, 0 to 1."""
    sync_share: float | None = None
    """Share of step time in which they waited for the gradient synchronisation, 0 to 1."""


def run_figures(views: Iterable[RankView]) -> RunFigures:
    """Return the figures, in one pass over the ranks."""
    steps: list[int] = []
    epoch = 0
    loss, losses = 0.0, 0
    rate, rates = 0.0, 0
    parts = working = synced = exposed = 0.0
    for view in views:
        last = view.last
        if last is None:
            continue
        steps.append(last.step)
        epoch = last.epoch if not epoch else min(epoch, last.epoch)
        if last.loss is not None:
            loss += last.loss
            losses += 1
        new, old = view.totals, view.totals_window[0]
        step_ms = new.step_ms - old.step_ms
        if step_ms > 0:
            rate += 1000 * (new.timed_samples - old.timed_samples) / step_ms
            rates += 1
        parts += new.phases_ms - old.phases_ms
        working += new.compute_ms - old.compute_ms + new.optimizer_ms - old.optimizer_ms
        synced += new.synced_ms - old.synced_ms
        exposed += new.exposed_ms - old.exposed_ms
    return RunFigures(
        step=min(steps, default=0),
        epoch=epoch,
        loss=loss / losses if losses else None,
        samples_per_s=rate if rates else None,
        compute_share=working / parts if parts > 0 else None,
        sync_share=exposed / synced if synced > 0 else None,
    )
