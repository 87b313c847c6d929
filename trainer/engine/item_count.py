"""Division of gradients by the items (samples, tokens) of all ranks, where the losses of a step give their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.contract.errors import TrainingError
from trainer.engine.model import gradients, scale
from trainer.engine.non_finite import FiniteCheck, no_item


class ItemCount:
    """Number of items of all ranks in an update, estimated by the last known number until gradients are corrected.

    On a GPU both numbers stay there, and a count of 0 is detected later.

    Args:
        estimate: estimate for the first update.
        parameters: parameters whose gradients are corrected.
        finite: checks counts on a GPU later; None on a CPU, where they are checked at once.
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
            TrainingError: no rank counts an item.
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
            scale(gradients(self._parameters), estimate / self.estimate)  # none before a backward pass
        return self.estimate / estimate
