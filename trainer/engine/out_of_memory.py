"""Recognition of out-of-memory errors, and their message, which describes the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import TrainingError
from trainer.contract.options import Training


class OutOfMemoryError(TrainingError):
    """A rank ran out of memory; the message has the step and the shapes of the batch."""


def raise_out_of_memory(error: Exception, batch: Any, *, step: int) -> None:
    """Raise an ``OutOfMemoryError`` with the shapes of the batch if memory ran out; ignore another error."""
    if is_out_of_memory(error):
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(f"out of memory at step {step}, batch {shapes(batch)}: {first_line}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a GPU, or on the host, where torch's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def less_memory(options: Training, world_size: int) -> str:
    """Return the end of a message: the options by which a training takes less memory; empty if it has taken them."""
    ways = [] if options.batch_size == (1,) else ["a smaller --batch-size with a larger --update-freq"]
    if options.strategy == "ddp" and world_size > 1:
        ways.append("--strategy fsdp, which divides the model among the ranks")
    return f"; less is taken by {', or '.join(ways)}" if ways else ""


def shapes(batch: Any) -> str:
    """Describe a batch's tensors for a message: ``[32, 64] int64, [32] int64``."""
    if isinstance(batch, Tensor):
        return f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return ", ".join(f"{key}: {shapes(value)}" for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return ", ".join(shapes(value) for value in batch)
    return type(batch).__name__
