"""Gradients of large embeddings on one CPU rank, of which a step touches only the rows of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class RowGradients:
    """Buffers of the gradients of embeddings, zero outside of the rows of the step in progress.

    The usual backward pass clears a gradient of all words, and the norm reads it, for the few hundred that a batch has.
    Here it gives the rows of those alone, which are laid in a buffer that stays, so that the optimizer meets the same
    numbers; those of several micro-batches are added in another order. A gradient to which another use of the weight
    adds stays as it is.

    Args:
        model: its embeddings with these weights are changed; call it after all that looks for sparse gradients.
        sparse: parameters whose gradients have few rows that are not zero.
    """

    def __init__(self, model: nn.Module, sparse: Sequence[nn.Parameter]) -> None:
        wanted = {id(parameter): parameter for parameter in sparse}
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._rows: list[tuple[Tensor, Tensor]] = []
        """Each buffer with values, and their rows [rows]."""
        for module in model.modules():
            # Others have a sparse gradient already, or no sparse one at all.
            if isinstance(module, nn.Embedding) and not (module.sparse or module.scale_grad_by_freq):
                weight = wanted.get(id(module.weight))
                if weight is not None and weight.requires_grad and not _has_hooks(weight):
                    module.sparse = True
                    self._buffers[weight] = torch.zeros_like(weight, requires_grad=False)

    def clear(self) -> None:
        """Clear the rows of the last step; no parameter has one of the buffers as its gradient any more."""
        for buffer, rows in self._rows:
            buffer.index_fill_(0, rows, 0.0)
        self._rows.clear()

    def fill(self) -> Mapping[int, Tensor]:
        """Lay the rows of all micro-batches of a step in the buffers, and make these the gradients.

        Return the rows with values [rows] by the address of the gradient.
        """
        for parameter, buffer in self._buffers.items():
            gradient = parameter.grad
            if gradient is None or not gradient.is_sparse:
                continue
            indices = gradient._indices()[0]
            # In their order, as the usual backward pass adds them.
            buffer.index_add_(0, indices, gradient._values())
            parameter.grad = buffer
            self._rows.append((buffer, torch.unique(indices)))
        return {buffer.data_ptr(): rows for buffer, rows in self._rows}


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether functions of the task are called with a parameter's gradient, which they expect to be dense."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
