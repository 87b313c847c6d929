from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from trained import train

FLAGS = ("--batch-size", 5, "--max-updates", 4, "--seed", 3, "--dropout", 0.2)
PER_SAMPLE = 4 * 8 * 16 + 6 * 16 * 12
"""Two products for the first layer, whose inputs need no gradient, and three for the second."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_operations_are_counted_once_and_nothing_of_the_training_changes(tmp_path: Path, ranks: int) -> None:
    counted = train(tmp_path / "on", *FLAGS, "--count-flops", "on", ranks=ranks)
    plain = train(tmp_path / "off", *FLAGS, "--count-flops", "off", ranks=ranks)
    (event,) = counted.of("model_flops")
    assert (counted.code, event["flops_per_sample"], event["number_format"]) == (0, PER_SAMPLE, "fp32")
    assert "peak_flops_per_s" not in event, "a CPU has none"
    assert plain.of("model_flops") == []
    assert torch.equal(counted.parameters, plain.parameters)


def test_the_count_is_that_of_torchs_own_counter() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(5, 8)).sum().backward()
    assert counter.get_total_flops() == 5 * PER_SAMPLE


def test_without_being_asked_a_cpu_counts_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, *FLAGS).of("model_flops") == []
