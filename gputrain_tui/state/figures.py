"""Figures of a whole run, from the states of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gputrain_tui.state.rank import RankView
from gputrain_tui.state.step_losses import mean_loss
from trainer.contract.record import ModelFlops


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of a whole run; None: not measured."""

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    """Mean of the ranks' losses at ``step``, nats."""
    step_ms: float | None = None
    """Mean duration of a step over the ranks' last events."""
    samples_per_s: float | None = None
    """Of all ranks together, over their last events."""
    tokens_per_s: float | None = None
    """Of all ranks together; None where the task counts none."""
    mfu: float | None = None
    """Model FLOPs utilization: share of the GPUs' peak that the model's operations take, 0 to 1."""
    compute_share: float | None = None
    """Share of step time in which the ranks computed: forward, backward and optimizer, 0 to 1."""
    sync_share: float | None = None
    """Share of step time in which they waited for the gradient synchronisation, 0 to 1."""


def run_figures(views: Iterable[RankView], flops: ModelFlops | None = None) -> RunFigures:
    """Return the figures; the step is the newest that every reporting rank has done."""
    reporting = [(view, view.last) for view in views if view.last is not None]
    step = min((last.step for _, last in reporting), default=0)
    epoch = min((last.epoch for _, last in reporting), default=0)
    rate, rates, token_rate = 0.0, 0, 0.0
    timed_ms, timed_steps = 0.0, 0
    parts = working = synced = exposed = 0.0
    for view, _ in reporting:
        new, old = view.totals, view.totals_window[0]
        step_ms = new.step_ms - old.step_ms
        timed_ms += step_ms
        timed_steps += new.timed_steps - old.timed_steps
        if step_ms > 0:
            rate += 1000 * (new.timed_samples - old.timed_samples) / step_ms
            token_rate += 1000 * (new.tokens - old.tokens) / step_ms
            rates += 1
        parts += new.phases_ms - old.phases_ms
        working += new.compute_ms - old.compute_ms + new.optimizer_ms - old.optimizer_ms
        synced += new.synced_ms - old.synced_ms
        exposed += new.exposed_ms - old.exposed_ms
    return RunFigures(
        step=step,
        epoch=epoch,
        loss=mean_loss(
            last.loss if last.step == step and last.losses is None else view.loss_at(step) for view, last in reporting
        ),
        step_ms=timed_ms / timed_steps if timed_steps else None,
        samples_per_s=rate if rates else None,
        tokens_per_s=token_rate or None,
        mfu=_utilization(rate, rates, flops),
        compute_share=working / parts if parts > 0 else None,
        sync_share=exposed / synced if synced > 0 else None,
    )


def _utilization(samples_per_s: float, ranks: int, flops: ModelFlops | None) -> float | None:
    """Return the share of the peak of as many GPUs as rank 0's.

    Source: Chowdhery et al., PaLM, appendix B; here what is computed twice counts, too.
    """
    if flops is None or not flops.peak_flops_per_s or not ranks:
        return None
    return samples_per_s * flops.flops_per_sample / (ranks * flops.peak_flops_per_s)
