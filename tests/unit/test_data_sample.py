"""Whether data is that of a checkpoint, by a few of its samples."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer.engine.data_sample import SAMPLES, DataSample

SIZE = 200


class Numbers:
    """Samples that are what they are, augmented from the global random numbers, or different at each reading."""

    def __init__(
        self, kind: str = "plain", altered: range = range(0), size: int = SIZE, *, reading_s: float = 0.0
    ) -> None:
        self.kind, self.altered, self.size, self.read = kind, altered, size, 0
        self.reading_s = reading_s
        """Seconds that the disk takes for a sample."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.read += 1
        if self.reading_s:
            time.sleep(self.reading_s)
        value = torch.full((3,), float(index + 1000 * (index in self.altered)))
        if self.kind == "augmented":
            value = value + torch.randn(3) + random.random()
        if self.kind == "unsteady":
            value = value + self.read
        return value, object() if self.kind == "opaque" else index


def sample(data: Numbers, *, num_workers: int = 0) -> DataSample:
    collate = (lambda samples: samples) if data.kind == "opaque" else default_collate
    return DataSample(data, collate, num_workers=num_workers)


@pytest.mark.parametrize("kind", ["plain", "augmented", "unsteady", "opaque"])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (1, 0)])
def test_the_data_sample_does_not_depend_on_loader_workers_or_augmentation(kind: str, before: int, after: int) -> None:
    kept = sample(Numbers(kind), num_workers=before).state_dict()
    assert kept["samples"] == SIZE
    assert len(kept["known"]) == (0 if kind == "opaque" else SAMPLES)
    assert sample(Numbers(kind), num_workers=after).altered(**kept) == ""


@pytest.mark.parametrize("kind", ["plain", "augmented"])
def test_altered_samples_are_counted_and_one_is_named(kind: str) -> None:
    kept = sample(Numbers(kind)).state_dict()
    altered = range(SIZE // 2)
    expected = [index for index, _ in kept["known"] if index in altered]
    message = sample(Numbers(kind, altered)).altered(**kept)
    assert message.startswith(f"{len(expected)} of {SAMPLES} samples that were compared have changed, ")
    assert message.endswith(f" {min(expected)}")
    assert sample(Numbers(kind, size=SIZE - 1)).altered(**kept) == f"it has {SIZE - 1} samples now, but had {SIZE}"


@pytest.mark.parametrize("reading_s", [0.1, pytest.param(1.1, marks=pytest.mark.slow)])
def test_of_data_that_is_read_slowly_only_the_samples_that_were_read_twice_count_as_changed(reading_s: float) -> None:
    kept = sample(Numbers()).state_dict()
    message = sample(Numbers(altered=range(SIZE), reading_s=reading_s)).altered(**kept)
    compared = re.match(r"(\d+) of \1 samples that were compared have changed, ", message)
    assert compared is not None, message
    assert 0 < int(compared[1]) <= SAMPLES // 2


def test_reading_a_sample_leaves_the_random_numbers_of_training_alone() -> None:
    def drawn() -> list[float]:
        return [random.random(), *torch.rand(2).tolist()]

    random.seed(1)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    torch.manual_seed(1)
    sample(Numbers("augmented")).state_dict()
    assert drawn() == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "augmented", "unsteady", "opaque"])
def test_a_sample_that_differs_when_it_is_read_again_is_known_before_and_after_a_resume(
    kind: str, workers: int
) -> None:
    first = sample(Numbers(kind), num_workers=workers)
    kept = first.state_dict()
    assert (first.unrepeatable is not None) == (kind == "unsteady")
    data = Numbers(kind)
    data.read = 7
    resumed = sample(data)
    assert resumed.altered(**kept) == ""
    assert (resumed.unrepeatable is not None) == (kind == "unsteady")
