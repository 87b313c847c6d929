"""Gradients of embeddings by their rows are those of the usual backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.engine.row_gradients import RowGradients

WORDS, WIDTH = 50, 6


class Bag(nn.Module):
    """Embedding with a row of padding, and a layer; ``tied``: the output has the weight of the embedding."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.output = nn.Linear(WIDTH, WORDS if tied else 3)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.output(self.embedding(words).mean(dim=1))
        return logits


def trained(build: Callable[[], nn.Module], batches: list[list[Tensor | None]], *, by_rows: bool) -> list[Tensor]:
    """Train on steps of micro-batches, None for a pass without the embedding; return parameters, gradients, norms."""
    torch.manual_seed(0)
    model = build()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, weight_decay=0.01, fused=True)
    rows = RowGradients(model, [model.embedding.weight] if by_rows else [])
    seen: list[Tensor] = []
    for step in batches:
        for parameter in parameters:
            parameter.grad = None
        rows.clear()
        for words in step:
            logits = model.output(torch.ones(2, WIDTH, dtype=parameters[0].dtype)) if words is None else model(words)
            logits.logsumexp(dim=1).sum().backward()
        nonzero = rows.fill()
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            assert not gradient.is_sparse
            if gradient.data_ptr() in nonzero:
                kept = gradient[nonzero[gradient.data_ptr()]]
                assert torch.equal(kept.square().sum(), gradient[gradient.any(dim=1)].square().sum())
            seen.append(gradient.clone())
        optimizer.step()
    return [*seen, *(parameter.detach() for parameter in parameters)]


def words(*sentences: list[int]) -> Tensor:
    return torch.tensor(sentences)


ONCE: list[list[Tensor | None]] = [
    [words([2, 3, 3, 1], [7, 2, 49, 0])],
    [None],  # a step that does not use the embedding
    [words([1, 1], [1, 1])],  # padding alone
    [words([30, 31], [2, 3])],
]
ACCUMULATED: list[list[Tensor | None]] = [
    [words([4, 4, 4, 4], [1, 1, 1, 1]), words([4, 9, 2, 3], [8, 8, 1, 1])],
    [words([5, 4], [3, 1]), None],
]


def test_the_rows_of_each_step_give_the_gradients_of_the_usual_backward_pass_to_the_bit() -> None:
    usual, by_rows = trained(Bag, ONCE, by_rows=False), trained(Bag, ONCE, by_rows=True)
    assert len(usual) == len(by_rows) > len(ONCE)
    assert all(map(torch.equal, usual, by_rows))


@pytest.mark.parametrize("tied", [False, True], ids=["own_weight", "weight_of_two_layers"])
def test_micro_batches_and_weights_of_two_layers_add_up_in_another_order_alone(tied: bool) -> None:
    def build() -> nn.Module:
        return Bag(tied=tied).double()

    batches = [*ONCE, *ACCUMULATED]
    usual, by_rows = trained(build, batches, by_rows=False), trained(build, batches, by_rows=True)
    assert len(usual) == len(by_rows) > len(batches)
    for expected, found in zip(usual, by_rows, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_an_embedding_whose_gradient_a_task_looks_at_stays(register: str) -> None:
    model = nn.Embedding(5, 2)
    getattr(model.weight, register)(lambda _: None)
    RowGradients(model, [model.weight])
    assert not model.sparse


def test_only_embeddings_that_were_named_are_changed_and_sparse_ones_stay() -> None:
    model = nn.ModuleDict(
        {"named": nn.Embedding(5, 2), "other": nn.Embedding(5, 2), "own": nn.Embedding(5, 2, sparse=True)}
    )
    rows = RowGradients(model, [model["named"].weight, model["own"].weight])
    assert [model[name].sparse for name in ("named", "other", "own")] == [True, False, True]
    model["own"](torch.tensor([1, 2])).sum().backward()
    assert rows.fill() == {}
    assert model["own"].weight.grad.is_sparse
