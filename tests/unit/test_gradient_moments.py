"""Estimates of a gradient's moments from norms, on gradients whose moments are known."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.engine.noise_scale import gradient_moments

TRUE_GRADIENT = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
SPREAD = torch.tensor([3.0, 1.0, 0.5, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("shares", [(8, 8), (4, 4, 4, 4), (12, 4), (1, 2, 13), (16, 0, 3)])
def test_the_means_of_many_estimates_are_the_true_moments_whatever_the_shares(shares: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    draws, samples = 20_000, sum(shares)
    each = TRUE_GRADIENT + SPREAD * torch.randn(draws, samples, 4, generator=generator, dtype=torch.float64)
    parts = [part.sum(1) / samples for part in each.split(list(shares), dim=1)]
    ranks_sq = sum(part.square().sum(-1) for part in parts)
    global_sq = sum(parts).square().sum(-1)
    assert isinstance(ranks_sq, torch.Tensor)
    found = gradient_moments(
        global_sq=float(global_sq.mean()),  # the estimates are linear in both
        ranks_sq=float(ranks_sq.mean()),
        samples=samples,
        squared_samples=sum(share**2 for share in shares),
    )
    assert found is not None
    assert found.gradient_sq == pytest.approx(float(TRUE_GRADIENT.square().sum()), rel=0.05)
    assert found.noise_sq == pytest.approx(float(SPREAD.square().sum()), rel=0.05)


def test_for_equal_shares_it_is_the_formula_of_the_paper() -> None:
    small, big, ranks = 8, 32, 4
    small_sq, big_sq = 5.0, 2.0  # squared norms of the mean gradients over so many samples
    found = gradient_moments(
        global_sq=big_sq, ranks_sq=ranks * small_sq / ranks**2, samples=big, squared_samples=ranks * small**2
    )
    assert found is not None
    assert found.gradient_sq == pytest.approx((big * big_sq - small * small_sq) / (big - small))
    assert found.noise_sq == pytest.approx((small_sq - big_sq) / (1 / small - 1 / big))


@pytest.mark.parametrize(
    "numbers",
    [
        {"squared_samples": 256.0},  # one rank has all samples
        {"ranks_sq": math.nan},  # a rank measures nothing
        {"global_sq": math.inf},
        {"samples": 0.0, "squared_samples": 0.0},
    ],
)
def test_without_two_shares_or_a_norm_there_is_no_estimate(numbers: dict[str, float]) -> None:
    assert (
        gradient_moments(**{"global_sq": 1.0, "ranks_sq": 1.0, "samples": 16.0, "squared_samples": 128.0} | numbers)
        is None
    )
