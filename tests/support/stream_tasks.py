"""Tasks whose training data is a stream: right and wrong kinds of ``IterableDataset``."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_task import TinyOptions, TinyTask
from torch.utils.data import IterableDataset, get_worker_info

from trainer.distributed import get_rank


class ShuffledStream(IterableDataset[Any]):
    """Stream in random order with random noise, without a length."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.samples)))
        random.shuffle(order)
        for index in order:
            inputs, targets = self.samples[index]
            yield inputs + 0.1 * torch.randn(()), targets


class SizedStream(ShuffledStream):
    def __len__(self) -> int:
        return len(self.samples)


class WrongLengthStream(ShuffledStream):
    """Stream with a wrong length."""

    def __len__(self) -> int:
        return len(self.samples) + 7


class ShardedStream(SizedStream):
    """Stream with shards of unequal length: the shard of rank r is proportional to r + 1."""

    def shard(self, count: int, index: int) -> ShuffledStream:
        owners = [rank for rank in range(count) for _ in range(rank + 1)]
        own = [place for place in range(len(self.samples)) if owners[place % len(owners)] == index]
        return ShuffledStream([self.samples[place] for place in own])


class SplitByWorker(ShuffledStream):
    """Stream that divides its samples among worker processes, as in torch's documentation."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from list(super().__iter__())[:: info.num_workers] if info else super().__iter__()


class SplitByRank(ShuffledStream):
    """Stream that divides its samples among ranks, without ``shard``."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[get_rank() :: 2]


class UnevenStream(ShuffledStream):
    """Stream with fewer samples on higher ranks."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[: len(self.samples) - 20 * get_rank()]


class UnrepeatableStream(ShuffledStream):
    """Stream with different samples on every pass."""

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in self.samples:
            yield inputs + float(int.from_bytes(os.urandom(2), "big")), targets


class OneShotStream(SizedStream):
    """Stream that can be iterated only once."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.source = iter([samples[index] for index in range(len(samples))])

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class StatefulStream(ShuffledStream):
    """Stream in random order with random noise that goes on from a state."""

    log = ""
    """File to which each index is appended when it is read."""
    kill_at = -1
    """Place in the order at which the process is killed."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.order: list[int] = []
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order, self.place = list(state["order"]), state["place"]

    def __iter__(self) -> Iterator[Any]:
        if not self.place:
            self.order = list(range(len(self.samples)))
            random.shuffle(self.order)
        while self.place < len(self.order):
            index = self.order[self.place]
            if self.log:
                with Path(self.log).open("a") as file:
                    file.write(f"{index}\n")
            if self.place == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            inputs, targets = self.samples[index]
            self.place += 1
            yield inputs + 0.1 * torch.randn(()), targets
        self.place = 0


class ForgetfulStream(StatefulStream):
    """Stream whose state does not hold its order."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]
        self.order = list(range(len(self.samples)))


class UnsavedStream(StatefulStream):
    """Stream with a state that a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "self": {1, 2}}


class StreamOptions(TinyOptions, kw_only=True):
    stream: str = "ShuffledStream"
    valid_stream: bool = False
    log: str = ""
    kill_at: int = -1


class StreamTask(TinyTask):
    Options = StreamOptions
    options: StreamOptions

    def datasets(self) -> Mapping[str, Any]:
        splits = dict(super().datasets())
        stream = globals()[self.options.stream](splits["train"])
        stream.log, stream.kill_at = self.options.log, self.options.kill_at
        valid = SizedStream(splits["valid"]) if self.options.valid_stream else splits["valid"]
        return {"train": stream, "valid": valid}
