"""The last batches of an epoch: how small they get, and what is left out of them on request."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.contract.errors import RequestError
from trainer.data.batches import EpochBatches
from trainer.data.shares import Shares


@pytest.mark.parametrize(
    ("sizes", "samples", "drop_last", "smallest"),
    [
        ((5, 5), 40, False, 5),
        ((5, 5), 41, False, 1),
        ((5, 5), 41, True, 5),
        ((5, 5), 46, False, 1),
        ((5, 5), 47, False, 2),
        ((5, 5), 7, False, 2),
        ((8, 2, 4), 25, False, 1),
        ((8, 2, 4), 24, False, 2),
        ((1,), 10, True, 1),
    ],
)
def test_the_smallest_batch_of_an_epoch(sizes: tuple[int, ...], samples: int, drop_last: bool, smallest: int) -> None:
    assert Shares(sizes, 0, drop_last).smallest(samples) == smallest


def batches(samples: int, rank: int = 0, **options: Any) -> EpochBatches:
    return EpochBatches(range(samples), collate=list, batch_sizes=(3, 3), rank=rank, seed=1, shuffle=False, **options)


def test_samples_that_do_not_fill_the_batch_of_every_rank_are_left_out_of_each_epoch() -> None:
    read = []
    for rank in (0, 1):
        own = batches(17, rank, drop_last=True)
        assert own.updates_per_epoch(1) == 2
        for _ in range(2):
            for update in own.updates(1):
                assert update.global_samples == 6
                read += [micro.batch for micro in update]
            assert own.state_dict()["consumed"] == 0, "the next epoch begins"
            own.next_epoch()
    assert read == 2 * [[0, 1, 2], [6, 7, 8]] + 2 * [[3, 4, 5], [9, 10, 11]]


def test_an_epoch_that_would_be_left_out_whole_is_refused() -> None:
    with pytest.raises(RequestError, match="need at least 6 with --drop-last"):
        batches(5, drop_last=True)
