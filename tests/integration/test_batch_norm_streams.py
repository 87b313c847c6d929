"""Statistics of a batch norm where the stream of rank 0 ends before that of rank 1."""

from __future__ import annotations

import pytest
import torch
from loop_on_ranks import train_on
from numeric_tasks import points
from rank_group import Gang
from torch import Tensor

OPTIONS = {"batch_size": (8,), "optimizer": "sgd", "lr": (0.01,), "max_updates": 2, "save": False}


def statistics_by_hand(*batches: Tensor) -> tuple[Tensor, Tensor]:
    """Return running mean and variance as torch's documentation defines them, with the momentum 0.1."""
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for batch in batches:
        mean = 0.9 * mean + 0.1 * batch.mean(0)
        variance = 0.9 * variance + 0.1 * batch.var(0, unbiased=True)
    return mean, variance


@pytest.mark.parametrize("first", [8, 16])
@pytest.mark.parametrize("broadcast_buffers", [False, True])
def test_dummy_batches_leave_the_statistics_alone_and_those_of_the_rank_with_data_are_kept(
    two_ranks: Gang, first: int, broadcast_buffers: bool
) -> None:
    inputs, _ = points(24)
    parts = (inputs[:first], inputs[first:])
    batches = [part.split(8) for part in parts]
    longest = batches[first == 8]
    if broadcast_buffers and first == 8:  # the second batch of rank 1 follows the first one of rank 0
        longest = (batches[0][0], batches[1][1])
    mean, variance = statistics_by_hand(*longest)
    options = {**OPTIONS, "broadcast_buffers": broadcast_buffers, "task_options": {"first": first}}
    for done in two_ranks.run(train_on, "numeric_tasks:NormStream", None, options):
        assert (done["error"], done["updates"]) == ("", 2)
        torch.testing.assert_close(done["model"]["0.running_mean"], mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(done["model"]["0.running_var"], variance, rtol=0, atol=1e-14)
        assert int(done["model"]["0.num_batches_tracked"]) == 2
