"""Random numbers of the GPU beside those that reading data draws."""

from __future__ import annotations

import torch

from trainer.data.seeds import RandomNumbers


def test_reading_data_leaves_the_random_numbers_of_the_gpu_as_they_are() -> None:
    device = torch.device("cuda")
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.cuda.manual_seed(5)
    numbers = RandomNumbers(1)
    with numbers():
        torch.rand(2)
    with numbers.seeded(2):
        torch.rand(2)
    assert torch.equal(torch.rand(4, device=device), expected)
