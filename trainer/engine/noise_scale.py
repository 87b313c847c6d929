"""Gradient noise scale of a training on several ranks, from the norms of their gradients.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1: a gradient over few samples has a
larger norm than one over many, by the noise of a sample's gradient. Here the few are a rank's, the many those of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer import distributed
from trainer.contract.options import Training
from trainer.contract.record import NoiseScale
from trainer.distributed.host_copies import HostCopy, begin_copy, host_copies
from trainer.engine.ddp_model import with_sparse_gradient
from trainer.engine.worker_context import WorkerContext
from trainer.telemetry.step_events import WARM_UP


class GradientMoments(NamedTuple):
    """Estimates of squared norms; a single one may be below 0, their means over many steps are right."""

    gradient_sq: float
    """Of the true gradient, that over all data."""
    noise_sq: float
    """Trace of the covariance of a sample's gradient: mean squared distance from the true one."""


def gradient_moments(
    *, global_sq: float, ranks_sq: float, samples: float, squared_samples: float
) -> GradientMoments | None:
    """Estimate without bias the moments of a step's gradient, with any shares of the ranks.

    Rank r adds up the gradients of b_r of B samples and divides by B; that is s_r, and the step's gradient is their
    sum. With q = Σ b_r² / B²: E Σ|s_r|² = q |G|² + tr Σ / B and E |Σ s_r|² = |G|² + tr Σ / B.

    Args:
        global_sq: |Σ s_r|².
        ranks_sq: Σ |s_r|².
        samples: B.
        squared_samples: Σ b_r².

    Returns:
        None if one rank has all samples, or a number is not finite.
    """
    q = squared_samples / samples**2 if samples > 0 else math.nan
    if not (math.isfinite(global_sq + ranks_sq) and 0.0 < q < 1.0):
        return None
    return GradientMoments((global_sq - ranks_sq) / (1.0 - q), samples * (ranks_sq - q * global_sq) / (1.0 - q))


class NoiseMeter:
    """Meter of the noise scale at the steps whose local gradient norms are measured; all ranks call it alike.

    Numerator and denominator are smoothed before they are divided, as in the paper: their ratio would be biased.
    """

    def __init__(self, model: torch.nn.Module, options: Training, ctx: WorkerContext) -> None:
        # Not by what is measured here: a rank without a record has to take part in the sums, too.
        exact = isinstance(model, DDP) and options.ddp_comm_hook != "powersgd" and not with_sparse_gradient(model)
        self._every = options.sync_detail_every if exact and ctx.world_size > 1 else 0
        self._ctx = ctx
        self._copies = ctx.copies or host_copies(ctx.device)
        self._count = 0
        self._step = self._measured = 0
        self._sums: Callable[[], Tensor] | None = None
        self._copy: HostCopy | None = None
        self._smoothed = GradientMoments(0.0, 0.0)

    def after_step(
        self, *, step: int, samples: int, own: Tensor | float | None, norm: Tensor | float, scale: Tensor | float
    ) -> None:
        """Begin to sum over the ranks, if the step is measured; report the sums of the one before.

        Args:
            step: optimizer steps done.
            samples: of this rank.
            own: norm [] of this rank's gradient before the reduction; None if it was not measured.
            norm: norm [] of the gradient after it.
            scale: factor [] that ``own`` has more than ``norm``.
        """
        if not self._every:
            return
        self.finish(waits=False)
        if self._count > WARM_UP and self._count % self._every == 0:
            world_size = self._ctx.world_size
            part = math.nan if own is None else own / scale / world_size  # DDP's mean is a sum over the world size
            numbers = [part**2, float(samples), float(samples) ** 2, norm**2 / world_size]
            self._sums = distributed.sum_async(torch.stack([self._number(each) for each in numbers]), self._ctx.device)
            self._step = step
        self._count += 1

    def finish(self, *, waits: bool = True) -> None:
        """Report a measurement that has been begun; on a GPU with ``waits``, or once its numbers have arrived."""
        if self._sums is not None:
            sums, self._sums = self._sums(), None
            self._copy = begin_copy(sums, self._copies) if self._ctx.rank == 0 else None
        if self._copy is not None and (waits or self._copy.arrived()):
            numbers, self._copy = self._copy.numbers(), None
            self._report(*numbers)

    def _number(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self._ctx.device)  # a copy from the host would wait

    def _report(self, ranks_sq: float, samples: float, squared_samples: float, global_sq: float) -> None:
        moments = gradient_moments(
            global_sq=global_sq, ranks_sq=ranks_sq, samples=samples, squared_samples=squared_samples
        )
        if moments is None:
            return
        self._measured += 1
        decay = min(0.95, 1.0 - 1.0 / self._measured)  # the mean of the first 20, then of about as many
        gradient_sq, noise_sq = (
            decay * before + (1.0 - decay) * now for before, now in zip(self._smoothed, moments, strict=True)
        )
        self._smoothed = GradientMoments(gradient_sq, noise_sq)
        least_measured = 5  # a single one may be far off
        known = self._measured >= least_measured and gradient_sq > 0.0 and noise_sq > 0.0
        self._ctx.writer.write(
            NoiseScale(
                time=time.time(),
                step=self._step,
                batch=int(samples),
                gradient_sq=moments.gradient_sq,
                noise_sq=moments.noise_sq,
                samples=noise_sq / gradient_sq if known else None,
            )
        )
