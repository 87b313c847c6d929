"""Formulas for the floating-point operations of matrix products, convolutions, attention and recurrent layers.

Not taken from ``torch.utils.flop_counter``, which ignores the groups of a convolution in its backward pass, counts
attention scores that the backward pass computes again, and covers neither attention on CPUs nor recurrent layers.
A multiplication and an addition are two operations. Causal attention is counted in full (Chowdhery et al., PaLM,
appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[[Sequence[Any], Any], tuple[int, Tensor]]
"""Takes an operator's arguments and result; returns its number of operations, and a tensor in their number format."""

UNCOUNTED = re.compile(
    r"(mm|matmul|linear|rnn|attention|layer_fwd)(_(?!flatten)|$)|conv(\d|_|olution)|gemm|lstm_mps|"
    r"^(lstm|gru)(_cell)?$|einsum|tensordot|multi_dot"
)
"""Names of torch operators that compute such products, or (composite ones, without gradients) call those that do."""


def _product(first: int) -> Formula:
    """Return the formula of the product of two arguments, [.., n, m] by [.., m, k], from the ``first`` on."""

    def count(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
        left, right = args[first], args[first + 1]
        return 2 * left.numel() * right.shape[-1], left

    return count


def _convolution(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
    inputs, weight, transposed = args[0], args[1], args[6]
    return _positions(inputs if transposed else out) * 2 * weight.numel(), inputs


def _convolution_backward(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
    gradient, inputs, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[10]
    gradients = int(output_mask[0]) + int(output_mask[1])  # of inputs and weight, each as many as forward
    return gradients * _positions(inputs if transposed else gradient) * 2 * weight.numel(), gradient


def _positions(tensor: Tensor) -> int:
    """Return how often a filter is applied: the elements of [N, C, ...] per channel."""
    return tensor.numel() // tensor.shape[1]


def _attention(first: int, passes: int) -> Formula:
    """Return the formula of attention with query, key and value from the ``first`` argument on, [N, H, T, D] each."""

    def count(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
        query, key, value = args[first : first + 3]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        return passes * 2 * scores * (query.shape[-1] + value.shape[-1]), query

    return count


def _cudnn_rnn(passes: int) -> Formula:
    def count(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
        inputs, weights = args[0], args[1]  # [tokens, D] where sequences are packed
        tokens = inputs.numel() // inputs.shape[-1]
        return passes * 2 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2), inputs

    return count


def _mkldnn_rnn(passes: int) -> Formula:
    def count(args: Sequence[Any], out: Any) -> tuple[int, Tensor]:
        inputs = args[0]
        tokens = inputs.numel() // inputs.shape[-1]
        return passes * 2 * tokens * (args[1].numel() + args[2].numel()), inputs

    return count


_aten = torch.ops.aten
FORMULAS: Mapping[Any, Formula] = {
    _aten.mm: _product(0),
    _aten.addmm: _product(1),
    _aten.bmm: _product(0),
    _aten.baddbmm: _product(1),
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention: _attention(0, 1),
    _aten._scaled_dot_product_efficient_attention: _attention(0, 1),
    _aten._scaled_dot_product_cudnn_attention: _attention(0, 1),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(0, 1),
    _aten._scaled_dot_product_flash_attention_backward: _attention(1, 2),
    _aten._scaled_dot_product_efficient_attention_backward: _attention(1, 2),
    _aten._scaled_dot_product_cudnn_attention_backward: _attention(1, 2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(1, 2),
    _aten._cudnn_rnn: _cudnn_rnn(1),
    _aten._cudnn_rnn_backward: _cudnn_rnn(2),
    _aten.mkldnn_rnn_layer: _mkldnn_rnn(1),
    _aten.mkldnn_rnn_layer_backward: _mkldnn_rnn(2),
}
"""Formulas by operator, for all its overloads."""
BY_CUDNN = (_aten.convolution, _aten.convolution_backward, _aten._cudnn_rnn, _aten._cudnn_rnn_backward)
"""Operators whose use of TF32 follows cuDNN's setting, not that of matrix products."""
