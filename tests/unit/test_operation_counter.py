"""Counted operations of modules, whose training must be the same with and without counting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.engine.model_flops import OperationCounter, format_of, formulas, peak_of_mixture

CPU = torch.device("cpu")
T, D, H = 6, 8, 2
"""Positions, features, heads."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(x.shape[0], T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Square(torch.autograd.Function):
    """x @ x of [D, D], whose backward pass is its author's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ x.T + x.T @ grad


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.5)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(D, D, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def passed(module: nn.Module, x: Tensor, counter: OperationCounter | None) -> list[Tensor]:
    """Return the loss and the gradients of a forward and backward pass."""
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_(x.is_floating_point())
    out = module(leaf)
    loss = (out[0] if isinstance(out, tuple) else out).sum()
    if counter is not None:
        counter.in_backward = True
    loss.backward()
    grads = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return [loss.detach(), *(grad.clone() for grad in grads if grad is not None)]


def counted(module: nn.Module, x: Tensor) -> OperationCounter:
    """Count a pass, which must be bit-equal to one that is not counted."""
    plain = passed(module, x, None)
    counter = OperationCounter(CPU)
    with counter:
        watched = passed(module, x, counter)
    assert len(plain) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    return counter


SCORES = 2 * 2 * T * T * D
"""Of all heads, forward: queries by keys, and weights by values."""
BATCH = 3


@pytest.mark.parametrize(
    ("module", "shape", "forward"),
    [
        (nn.Linear(D, 5), (BATCH, T, D), BATCH * T * 2 * D * 5),
        (Attention(), (BATCH, T, D), BATCH * (T * 2 * D * 3 * D + SCORES)),
        (nn.Conv2d(D, 12, 3, padding=1), (BATCH, D, 5, 5), BATCH * 25 * 2 * 12 * D * 9),
        (nn.Conv2d(D, 12, 3, groups=4), (BATCH, D, 5, 5), BATCH * 9 * 2 * 12 * D // 4 * 9),
        (nn.Conv1d(D, D, 3, groups=D, stride=2), (BATCH, D, 9), BATCH * 4 * 2 * D * 3),
        (nn.ConvTranspose1d(D, 5, 3, stride=2), (BATCH, D, 9), BATCH * 9 * 2 * D * 5 * 3),
        (Applied(lambda x: torch.einsum("bij,bkj->bik", x, x)), (BATCH, T, D), BATCH * 2 * T * D * (D + T)),
        (Applied(Square.apply), (D, D), 2 * 2 * D**3),
        (Recomputed(reentrant=False), (BATCH, D), BATCH * 2 * D * D),
        (Recomputed(reentrant=True), (BATCH, D), BATCH * 2 * D * D),
    ],
)  # fmt: skip
def test_a_pass_counts_the_models_operations_three_times_those_of_its_forward_pass(
    module: nn.Module, shape: tuple[int, ...], forward: int
) -> None:
    counter = counted(module, torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert (counter.failed, counter.flops) == (False, {"fp32": 3 * forward})


def test_the_first_state_of_a_layer_that_is_taken_apart_needs_no_gradient() -> None:
    forward, first = 2 * BATCH * T * 2 * 3 * 7 * (D + 7), 2 * BATCH * 2 * 3 * 7 * 7
    counter = counted(nn.GRU(D, 7, bidirectional=True), torch.randn(T, BATCH, D))
    assert (counter.failed, counter.flops) == (False, {"fp32": 3 * forward - first})


def test_an_embedding_makes_no_product_and_its_layer_needs_no_gradient_of_its_inputs() -> None:
    module = nn.Sequential(nn.Embedding(10, D), nn.Linear(D, 5))
    counter = counted(module, torch.arange(6).view(2, 3))
    assert (counter.failed, counter.flops) == (False, {"fp32": 3 * 6 * 2 * D * 5})


def test_products_count_in_the_format_in_which_they_are_made() -> None:
    x = torch.randn(BATCH, D)
    half, double = nn.Linear(D, D).bfloat16(), nn.Linear(D, D).double()

    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(half(x.bfloat16()).double())

    assert counted(Mixed(), x).flops == {"bf16": 3 * BATCH * 2 * D * D, "fp64": 3 * BATCH * 2 * D * D}
    linear = nn.Linear(D, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert set(counted(linear, x).flops) == {"bf16"}


@torch.library.custom_op("gputrain_tests::product", mutates_args=())
def product(x: Tensor) -> Tensor:
    return x @ x.T


product.register_autograd(lambda ctx, grad: torch.ones(BATCH, D), setup_context=lambda ctx, inputs, output: None)


@torch.inference_mode()
def teacher(x: Tensor) -> Tensor:
    return F.linear(x.detach(), torch.ones(D, D))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: product(x),
        lambda x: torch.sparse.mm(torch.eye(BATCH).to_sparse(), x),
        lambda x: F.bilinear(x, x, torch.ones(2, D, D)),
        lambda x: x + teacher(x).clone(),
        lambda x: x.to(torch.complex64) @ torch.ones(D, D, dtype=torch.complex64),
        lambda x: nn.LSTM(D, D)(x)[0],
        lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged).to_padded_tensor(0.0),
    ],
    ids=["another library", "sparse", "no formula", "inference mode", "complex", "recurrent", "nested"],
)
def test_uncountable_operations_leave_no_figure_and_the_training_unchanged(function: Callable[..., Any]) -> None:
    def absolute(x: Tensor) -> Tensor:
        found = function(x)
        return found.abs() if found.is_complex() else found

    assert counted(Applied(absolute), torch.randn(BATCH, D)).failed


def test_a_formula_that_fails_ends_the_counting_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, out_val: object) -> int:
        raise RuntimeError("no such shape")

    monkeypatch.setitem(formulas(), torch.ops.aten.addmm, broken)
    assert counted(nn.Linear(D, D), torch.randn(BATCH, D)).failed


@pytest.mark.parametrize(
    ("flops", "peak"),
    [
        ({"bf16": 300}, 989e12),
        ({"bf16": 989, "tf32": 494}, (989 + 494) / 2 * 1e12),  # a second each at its own peak
        ({"bf16": 300, "fp64": 1}, None),
    ],
)
def test_operations_of_several_formats_have_the_peak_of_their_mixture(flops: Any, peak: float | None) -> None:
    assert peak_of_mixture("NVIDIA H200", 132, flops) == (None if peak is None else pytest.approx(peak))


@pytest.fixture
def float32_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("precision", "by_cudnn", "capability", "of_products", "of_convolutions"),
    [
        ("highest", False, (9, 0), "fp32", "fp32"),
        ("high", False, (9, 0), "tf32", "fp32"),
        ("medium", True, (8, 0), "tf32", "tf32"),
        ("highest", True, (8, 0), "fp32", "tf32"),
        ("high", True, (7, 5), "fp32", "fp32"),  # before Ampere there is none
        ("high", True, None, "fp32", "fp32"),  # a CPU
    ],
)
@pytest.mark.usefixtures("float32_settings")
def test_32_bit_floats_are_tf32_where_the_setting_in_force_and_the_gpu_round_them(
    precision: str, by_cudnn: bool, capability: tuple[int, int] | None, of_products: str, of_convolutions: str
) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = by_cudnn
    assert format_of(torch.float32, capability) == of_products
    assert format_of(torch.float32, capability, by_cudnn=True) == of_convolutions
    assert format_of(torch.bfloat16, capability) == "bf16"
    assert format_of(torch.float8_e4m3fn, capability) is None
