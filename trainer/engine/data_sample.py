"""Digests of a few samples of a dataset, by which a resumed training and the ranks detect unequal data."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trainer.checkpoint import CheckpointError, copy_to_cpu
from trainer.data.dataset import AnyDataset, SizedDataset, is_stream
from trainer.data.loader import BatchLoader, Collate, mix_seed
from trainer.data.seeds import keep_random_state, seed_all
from trainer.distributed import all_gather_list, require_same
from trainer.distributed.encoding import encode

SAMPLES = 32
"""Number of samples; if a tenth of the data was altered, they show it with a probability of 97 %."""


class DataSample:
    """Digests of a few samples of a dataset, to compare with those in a checkpoint or of another rank.

    Of a stream there are none: ``StreamBatches`` compares its first samples instead. If the training has loader
    processes, the samples are read in one too: a dataset may open its file at the first sample, and processes share a
    file that is opened before they are forked.
    """

    def __init__(self, dataset: AnyDataset, collate: Collate, *, num_workers: int) -> None:
        self.of_stream = is_stream(dataset)
        self._dataset = cast(SizedDataset, dataset)
        self._collate = collate
        self._num_workers = min(num_workers, 1)
        self._size = 0 if self.of_stream else len(self._dataset)
        self._known: list[list[int | str]] | None = None
        self.unrepeatable: int | None = None
        """A sample that differs when it is read again with the same seed; None if none is known."""

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the dataset, and index and digest of a few samples, which the first call reads."""
        if self._known is None:
            indices = random.Random(self._size).sample(range(self._size), min(SAMPLES, self._size))
            # The first one is read twice: with a generator of its own a dataset gives another sample then.
            again, *digests = self._digests([*indices[:1], *indices]) or [""]
            if digests and again != digests[0]:
                self.unrepeatable = indices[0]
            self._known = [[index, digest] for index, digest in zip(indices, digests, strict=False) if digest]
        return {"samples": self._size, "known": self._known}

    def repeatable(self, indices: Sequence[int]) -> list[int]:
        """Return the indices of samples whose digest is the same when they are read again."""
        known = dict(self.state_dict()["known"])
        read = zip(indices, self._digests(indices), strict=False)
        return [index for index, digest in read if digest and digest == known.get(index)]

    def altered(self, samples: int, known: Sequence[tuple[int, str]]) -> str:
        """Describe how the data differs from that of a checkpoint, which had so many samples; empty if it does not."""
        if self.of_stream:
            return ""
        if samples != self._size:
            return f"it has {self._size} samples now, but had {samples}"
        indices = [index for index, _ in known]
        read = list(zip(known, self._digests(indices), strict=False))
        unequal = [index for (index, digest), now in read if now and now != digest]
        # A sample that differs between two readings of the same data is no evidence.
        # Twice by the same process: each loader process begins with the same state of a generator.
        pairs = self._digests([index for index in unequal for _ in range(2)])
        twice = list(zip(unequal, pairs[::2], pairs[1::2], strict=False))
        altered = [index for index, one, two in twice if one == two]
        self.unrepeatable = next((index for index, one, two in twice if one != two), None)
        if not altered:
            self._known = [[index, digest] for index, digest in known]
            return ""
        compared = sum(bool(now) for _, now in read) - len(unequal) + len(twice)  # the others were not read in time
        return f"{len(altered)} of {compared} samples that were compared have changed, such as sample {min(altered)}"

    def _digests(self, indices: Sequence[int]) -> list[str]:
        """Return a digest of each sample, empty where it has none; fewer where reading fails or takes long.

        The time counts from the first sample on, without the start of a loader process. A second one is read however
        long it takes, as an altered sample is read twice.
        """
        if not indices:
            return []
        began = 0.0
        digests: list[str] = []
        reader = BatchLoader(self._dataset, self._digest_of, num_workers=self._num_workers, pin_memory=False)
        seed = 0  # seed for reading samples, so that random augmentation is the same each time
        read = reader.read(range(self._size), indices, lambda index: (index, index + 1), seed=seed)
        budget_s = 1.0  # seconds after which no further sample is read, since training waits for it
        try:
            with keep_random_state():
                for index in indices:
                    seed_all(mix_seed(seed, index))  # as a loader process does
                    digests.append(next(read).batch)
                    if len(digests) == 1:
                        began = time.monotonic()
                    elif time.monotonic() - began > budget_s:
                        break
        except Exception:  # noqa: BLE001 - training raises the same error when it reads the sample
            return digests
        finally:
            reader.close()
        return digests

    def _digest_of(self, samples: list[Any]) -> str:
        try:
            content = encode(copy_to_cpu(self._collate(samples)))
        except (CheckpointError, TypeError):
            return ""  # it holds an object that cannot be encoded
        return hex_digest(content, size=16)


def hex_digest(content: Tensor, *, size: int) -> str:
    """Return a digest of so many bytes of some bytes, [bytes] of uint8."""
    buffer = bytearray(content.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(content)
    return hashlib.blake2b(buffer, digest_size=size).hexdigest()


def require_same_data(samples: Mapping[str, DataSample], request: Mapping[str, str]) -> None:
    """Raise unless all ranks have the same request and read the same data; every rank calls this."""
    known = {split: sample.state_dict() for split, sample in samples.items()}
    require_same({**request, **{f"samples of {split}": str(data["samples"]) for split, data in known.items()}})
    everywhere = [
        {split: dict(pairs) for split, pairs in rank.items()}
        for rank in all_gather_list({split: data["known"] for split, data in known.items()})
    ]
    suspects = {
        split: [index for index in own if len({rank[split][index] for rank in everywhere if index in rank[split]}) > 1]
        for split, own in everywhere[0].items()
    }
    if not any(suspects.values()):
        return
    # A sample that differs between two readings on one rank is no evidence.
    repeatable = all_gather_list({split: samples[split].repeatable(indices) for split, indices in suspects.items()})
    shown: dict[str, str] = {}
    for split, indices in suspects.items():
        first = next((index for index in indices if all(index in rank[split] for rank in repeatable)), None)
        if first is not None:
            shown[f"contents of {split}"] = f"sample {first} with digest {dict(known[split]['known'])[first][:8]}"
    require_same(shown)
