"""Recognition of out-of-memory errors, their message, which describes the batch, and parts of a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import TrainingError
from trainer.data.loader import MicroBatch, leaves, map_values


class OutOfMemoryError(TrainingError):
    """A rank ran out of memory in a ``step``, from 1; the message has it and the shapes of the batch."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


def raise_out_of_memory(error: Exception, batch: Any, *, step: int) -> None:
    """Raise an ``OutOfMemoryError`` with the shapes of the batch if memory ran out; ignore another error."""
    if is_out_of_memory(error):
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"out of memory at step {step}, batch {shapes(batch)}: {first_line}"
        raise OutOfMemoryError(message, step=step) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a GPU, or on the host, where torch's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def shapes(batch: Any) -> str:
    """Describe a batch's tensors for a message: ``[32, 64] int64, [32] int64``."""
    if isinstance(batch, Tensor):
        return f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return ", ".join(f"{key}: {shapes(value)}" for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return ", ".join(shapes(value) for value in batch)
    return type(batch).__name__


def divides(micro: MicroBatch) -> bool:
    """Return whether a batch can be divided by samples: all in it are tensors with one row for each."""
    return all(isinstance(leaf, Tensor) and leaf.shape[:1] == (micro.samples,) for leaf in leaves(micro.batch))


def in_parts(micro: MicroBatch, most: int) -> list[MicroBatch]:
    """Return a batch in parts of nearly equal size, of ``most`` samples at most."""
    count = -(-micro.samples // most)
    ends = [micro.samples * part // count for part in range(count + 1)]
    return [part_of(micro, low, high) for low, high in pairwise(ends)]


def part_of(micro: MicroBatch, low: int, high: int) -> MicroBatch:
    """Return some samples of a batch that ``divides``."""
    return MicroBatch(_sliced(micro.batch, low, high), high - low)


def _sliced(batch: Any, low: int, high: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[low:high]
    return map_values(lambda value: _sliced(value, low, high), batch)
