"""Figures of a whole run, from the states of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gputrain_tui.state.rank import RankView
from gputrain_tui.state.step_losses import mean_loss
from gputrain_tui.state.totals import Totals


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates of all ranks together; None: not measured."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """None where a rank counts none."""
    mfu: float | None = None
    """Model FLOPs utilization: share of the GPUs' peak that the model's operations take, 0 to 1. None where the
    operations of a rank or the peak of its GPU are not known."""


@dataclass(frozen=True, kw_only=True)
class RunFigures(Throughput):
    """Figures of a whole run, its rates over the ranks' last events; None: not measured."""

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    """Mean of the ranks' losses at ``step``, nats."""
    step_ms: float | None = None
    """Mean duration of a step over the ranks' last events."""
    compute_share: float | None = None
    """Share of step time in which the ranks computed: forward, backward and optimizer, 0 to 1."""
    sync_share: float | None = None
    """Share of step time in which they waited for the gradient synchronisation, 0 to 1."""


def run_figures(views: Iterable[RankView]) -> RunFigures:
    """Return the figures; the step is the newest that every reporting rank has done."""
    reporting = [(view, view.last, view.recent) for view in views if view.last is not None]
    step = min((last.step for _, last, _ in reporting), default=0)
    epoch = min((last.epoch for _, last, _ in reporting), default=0)
    timed_ms, timed_steps = 0.0, 0
    phases_ms = compute_ms = synced_ms = exposed_ms = 0.0
    for _, _, recent in reporting:
        timed_ms += recent.step_ms
        timed_steps += recent.timed_steps
        phases_ms += recent.phases_ms
        compute_ms += recent.compute_ms + recent.optimizer_ms
        synced_ms += recent.synced_ms
        exposed_ms += recent.exposed_ms
    rates = _throughput([(view, recent, recent) for view, _, recent in reporting])
    return RunFigures(
        samples_per_s=rates.samples_per_s,
        tokens_per_s=rates.tokens_per_s,
        mfu=rates.mfu,
        step=step,
        epoch=epoch,
        loss=mean_loss(
            last.loss if last.step == step and last.losses is None else view.loss_at(step)
            for view, last, _ in reporting
        ),
        step_ms=timed_ms / timed_steps if timed_steps else None,
        compute_share=compute_ms / phases_ms if phases_ms > 0 else None,
        sync_share=exposed_ms / synced_ms if synced_ms > 0 else None,
    )


def run_throughput(views: Iterable[RankView]) -> Throughput:
    """Return the rates over the whole run; the utilization only since the last start, as GPUs may have changed."""
    return _throughput([(view, view.totals, view.totals.since(view.totals_at_start)) for view in views])


def _throughput(ranks: Sequence[tuple[RankView, Totals, Totals]]) -> Throughput:
    """Return the rates of ranks, each with the sums for its rates and those for its utilization."""
    stepping = [(view, rates, used) for view, rates, used in ranks if rates.step_ms > 0]
    tokens = [rates.tokens_per_s for _, rates, _ in stepping]
    return Throughput(
        samples_per_s=sum(rates.samples_per_s or 0.0 for _, rates, _ in stepping) if stepping else None,
        tokens_per_s=sum(rate or 0.0 for rate in tokens) if tokens and None not in tokens else None,
        mfu=_utilization([(view, used.samples_per_s) for view, _, used in stepping]),
    )


def _utilization(ranks: Sequence[tuple[RankView, float | None]]) -> float | None:
    """Return the used share of the peak of all GPUs; a GPU that several ranks share counts once.

    Source: Chowdhery et al., PaLM, appendix B.
    """
    used, peaks = 0.0, dict[str, float]()
    for view, samples_per_s in ranks:
        flops = view.flops
        if flops is None or flops.varies or not flops.peak_flops_per_s or samples_per_s is None:
            return None
        used += samples_per_s * flops.flops_per_sample
        uuid = (view.device or "").partition(" ")[2]
        peaks[uuid if uuid.startswith("GPU-") else f"rank {view.rank}"] = flops.peak_flops_per_s
    return used / sum(peaks.values()) if peaks else None
