"""Divides gradients by the items (samples, tokens) of all ranks, where only the losses of a step tell how many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.contract.errors import TrainingError
from trainer.engine.model import gradients
from trainer.engine.non_finite import FiniteCheck, no_item


class ItemCount:
    """The items of all ranks in an update: the last known number stands in until the true one corrects the gradients.

    On a GPU both stay there, and whether anything counted is looked at later.

    Args:
        estimate: of the first update.
        parameters: whose gradients are corrected.
        finite: looks at counts later; None where they are on the host and looked at at once.
    """

    def __init__(
        self, estimate: float, *, parameters: Sequence[nn.Parameter], finite: FiniteCheck | None = None
    ) -> None:
        self.estimate: Tensor | float = estimate
        self._parameters = parameters
        self._finite = finite

    def begin(self, count: Tensor | float, device: torch.device) -> None:
        """Begin to sum this rank's items over the ranks."""
        self._sum = distributed.sum_async(count, device)

    def correct(self, *, step: int) -> Tensor | float:
        """Turn gradients that were divided by the estimate into the exact mean; the true count is the next estimate.

        Returns:
            The true count over the estimate.

        Raises:
            TrainingError: nothing counts.
        """
        total, estimate = self._sum(), self.estimate
        if self._finite is None:
            self.estimate = total.item()
            if self.estimate <= 0:
                raise TrainingError(no_item(step))
        else:
            self._finite.require_count(total, step=step)
            self.estimate = torch.where(total > 0, total, estimate)
        if isinstance(self.estimate, Tensor) or self.estimate != estimate:
            found = gradients(self._parameters)  # there are none before the only backward pass
            for dtype in {gradient.dtype for gradient in found}:
                same = [gradient for gradient in found if gradient.dtype is dtype]
                torch._foreach_mul_(same, factor_for(estimate / self.estimate, dtype))
        return self.estimate / estimate


def factor_for(factor: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """Return a factor for tensors of a type: where it is a tensor [], float64, the product must not become one."""
    return factor.to(dtype) if isinstance(factor, Tensor) else factor
