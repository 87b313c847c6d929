"""A few samples of the training data as digests, kept in a checkpoint: other data is known when training resumes."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from trainer.checkpoint import CheckpointError, capture_rng, copy_to_cpu, restore_rng
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.loader import BatchLoader, Collate, mix_seed
from trainer.data.seeds import seed_all
from trainer.distributed import all_gather_list, require_same
from trainer.distributed.encoding import encode

SAMPLES = 32
"""Of data of which a tenth was altered, this many samples show it 97 times in 100."""
BUDGET_S = 1.0
"""Seconds after which no further sample is read: training waits meanwhile."""
_SEED = 0
"""Of the random numbers that reading draws: augmentation is then the same each time."""


class DataSample:
    """Reads single samples of a dataset and compares them with what a checkpoint knows of them.

    Args:
        dataset: the training data.
        collate: makes a batch of the one sample.
        num_workers: reading processes of the training. Where it has some, the samples are read in one too: a dataset
            may open its file at the first sample, and a file that is open before a fork is shared by the processes.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, *, num_workers: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._num_workers = min(num_workers, 1)
        self._known: list[list[int | str]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples the data has and, of a few, index and digest; they are read at the first call."""
        if self._known is None:
            size = len(self._dataset)
            indices = random.Random(size).sample(range(size), min(SAMPLES, size))
            self._known = [
                [index, digest] for index, digest in zip(indices, self._digests(indices), strict=False) if digest
            ]
        return {"samples": len(self._dataset), "known": self._known}

    def steady(self, indices: Sequence[int]) -> list[int]:
        """Return those of the samples that are read again as they were read first."""
        known = dict(self.state_dict()["known"])
        again = zip(indices, self._digests(indices), strict=False)
        return [index for index, digest in again if digest and digest == known.get(index)]

    def altered(self, samples: int, known: Sequence[tuple[int, str]]) -> str:
        """Return in words how the data differs from that of a checkpoint; empty where no difference is seen.

        Args:
            samples: how many the data had.
            known: index and digest of some of them.
        """
        size = len(self._dataset)
        if samples != size:
            return f"it has {size} samples now and had {samples}"
        indices = [index for index, _ in known]
        other = [index for (index, was), now in zip(known, self._digests(indices), strict=False) if now and now != was]
        # What differs between two readings of the same data says nothing about the data.
        steady = [
            index
            for index, one, two in zip(other, self._digests(other), self._digests(other), strict=False)
            if one == two
        ]
        if not steady:
            self._known = [[index, digest] for index, digest in known]
            return ""
        return f"of {len(known)} samples that were compared {len(steady)} are not what they were, such as {min(steady)}"

    def _digests(self, indices: Sequence[int]) -> list[str]:
        """Return a digest of each sample, empty where it has none; fewer where reading fails or takes long."""
        began = time.monotonic()
        found: list[str] = []
        reader = BatchLoader(self._dataset, self._digest, num_workers=self._num_workers, pin_memory=False)
        read = reader.read(range(len(self._dataset)), indices, lambda index: (index, index + 1), seed=_SEED)
        try:
            with _own_random_numbers():
                for index in indices:
                    seed_all(mix_seed(_SEED, index))  # as a reading process does
                    found.append(next(read).batch)
                    if time.monotonic() - began > BUDGET_S:
                        break
        except Exception:  # noqa: BLE001 - training meets the error itself, in its place
            return found
        finally:
            reader.close()
        return found

    def _digest(self, samples: list[Any]) -> str:
        try:
            content = encode(copy_to_cpu(self._collate(samples)))
        except (CheckpointError, TypeError):
            return ""  # it holds something that has no bytes of its own
        buffer = bytearray(content.numel())
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(content)
        return hashlib.blake2b(buffer, digest_size=16).hexdigest()


class NoDataSample:
    """Stands for the sample of a stream, whose readers compare what it begins with."""

    def state_dict(self) -> dict[str, Any]:
        """Return that nothing is known."""
        return {"samples": 0, "known": []}

    def altered(self, samples: int, known: Sequence[tuple[int, str]]) -> str:
        """Return that no difference is seen."""
        return ""


def data_sample(dataset: AnyDataset, collate: Collate, *, num_workers: int) -> DataSample | NoDataSample:
    """Return the sample of a dataset."""
    if is_stream(dataset):
        return NoDataSample()
    return DataSample(cast(SizedDataset, dataset), collate, num_workers=num_workers)


def samples_to_compare(
    splits: Mapping[str, AnyDataset], collate: Collate, *, train: DataSample | NoDataSample, world_size: int
) -> dict[str, DataSample]:
    """Read the samples of every split by which the ranks compare their data; none in a world of one."""
    if world_size == 1:
        return {}
    others = {split: data for split, data in splits.items() if split != "train"}
    every = {split: data_sample(data, collate, num_workers=0) for split, data in others.items()}
    every["train"] = train
    samples = {split: sample for split, sample in every.items() if isinstance(sample, DataSample)}
    for sample in samples.values():
        sample.state_dict()
    return samples


def require_same_data(samples: Mapping[str, DataSample], request: Mapping[str, str]) -> None:
    """Require that all ranks were asked for the same and read the same data; every rank takes part.

    Args:
        samples: of every split.
        request: values by name that must be equal on all ranks.

    Raises:
        RequestError: one line that names the ranks, their hosts and what differs, the same on every rank.
    """
    known = {split: sample.state_dict() for split, sample in samples.items()}
    require_same({**request, **{f"samples of {split}": str(data["samples"]) for split, data in known.items()}})
    everywhere = [
        {split: dict(pairs) for split, pairs in rank.items()}
        for rank in all_gather_list({split: data["known"] for split, data in known.items()})
    ]
    suspects = {
        split: [
            index for index in first if len({rank[split][index] for rank in everywhere if index in rank[split]}) > 1
        ]
        for split, first in everywhere[0].items()
    }
    if not any(suspects.values()):
        return
    # What differs between two readings on one rank says nothing about the data.
    steady = all_gather_list({split: samples[split].steady(indices) for split, indices in suspects.items()})
    shown: dict[str, str] = {}
    for split, indices in suspects.items():
        found = next((index for index in indices if all(index in rank[split] for rank in steady)), None)
        if found is not None:
            shown[f"contents of {split}"] = f"sample {found} with digest {dict(known[split]['known'])[found][:8]}"
    require_same(shown)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the random numbers of the training as they are."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
