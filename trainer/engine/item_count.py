"""Items (samples, tokens) of a step, by whose number over all ranks its summed losses are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.data.batches import Update
from trainer.engine.ddp_model import gradients, scale
from trainer.engine.non_finite import FiniteCheck
from trainer.engine.worker_context import WorkerContext


class ItemCount:
    """Items of the step in progress, and the weight of its losses: W / B for W ranks that count B items together.

    With ``count_per_sample`` B is known beforehand. Otherwise the last known B is used, and the gradients are corrected
    after the reduction; with a compressing comm hook before it, since half precision holds a mean but may not hold a
    sum. On a GPU the numbers stay there, and a count of 0 is detected later.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        *,
        per_sample: int | None,
        estimate: float,
        parameters: Sequence[nn.Parameter],
        finite: FiniteCheck,
        before_reduction: bool,
    ) -> None:
        self.estimate: Tensor | float = estimate
        self.samples = 0
        self._ctx = ctx
        self._per_sample = per_sample
        self._parameters = parameters
        self._finite = finite
        self._before_reduction = before_reduction
        self._total: Callable[[], Tensor] | None = None
        """Return the count of all ranks; None if it is that of this one."""
        self._factor = 0.0
        self._weight = torch.zeros(())

    @property
    def tokens(self) -> int | None:
        """None if a sample is one item, or items are not known per sample."""
        return self.samples * self._per_sample if self._per_sample and self._per_sample > 1 else None

    def begin_step(self, update: Update, *, step: int) -> None:
        self._step, self.samples = step, 0
        self._count: Tensor | float = 0
        self._divisor = update.global_samples * self._per_sample if self._per_sample else self.estimate

    def add(self, loss: Tensor, count: Tensor | float, samples: int, *, last: bool) -> Tensor:
        """Count a micro-batch of this rank, and after the last one begin to sum over the ranks; return its loss []."""
        if not samples:  # a dummy is for the other ranks' collectives; it counts for nothing
            loss, count = loss * 0.0, 0
        self.samples += samples
        self._count = self._count + count
        if last and self._per_sample:
            self._finite.require_items(self._count, samples=self.samples, step=self._step)
        elif last:
            alone = self._ctx.world_size == 1 and not isinstance(self._count, Tensor)
            self._total = None if alone else distributed.sum_async(self._count, self._ctx.device)
            if self._before_reduction:
                self._correct()
                self._divisor = self.estimate
        return loss

    def weight(self, loss: Tensor) -> Tensor:
        """Return W / B in the shape of a summed loss, to begin its backward pass with.

        DDP averages over the W ranks, which gives the gradient of the mean over all items. The same tensor serves as
        long as the number is the same: to create one, or to multiply the loss, takes longer than a small layer.
        """
        factor = self._ctx.world_size / self._divisor
        if isinstance(factor, Tensor):
            return factor.to(loss.dtype).expand_as(loss)
        if factor != self._factor or self._weight.dtype != loss.dtype or self._weight.shape != loss.shape:
            self._factor, self._weight = factor, torch.full_like(loss.detach(), factor)
        return self._weight

    def correct_gradients(self) -> Tensor | float:
        """Turn gradients that were divided by an estimate into the exact mean; return true count over estimate."""
        return 1.0 if self._per_sample or self._before_reduction else self._correct()

    def mean(self, loss: Tensor | float) -> Tensor | float | None:
        """Return the mean of this rank's summed losses over its items; None if it is known to count none."""
        # The samples of a rank may count no item; a count that is a tensor is not read, as that may be a sync point.
        return loss / self._count if self.samples and (isinstance(self._count, Tensor) or self._count) else None

    def _correct(self) -> Tensor | float:
        total = self._count if self._total is None else self._total()
        estimate, total = self.estimate, self._finite.require_count(total, step=self._step)
        self.estimate = torch.where(total > 0, total, estimate) if isinstance(total, Tensor) else total
        if isinstance(self.estimate, Tensor) or self.estimate != estimate:
            scale(gradients(self._parameters), estimate / self.estimate)  # none before a backward pass
        return self.estimate / estimate
