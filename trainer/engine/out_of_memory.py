"""Recognition of out-of-memory errors, their message, which describes the batch, and trials of a larger batch.

A rank that runs out of memory in a step has left the others in a reduction that it cannot complete. So a share that is
new is tried before its first step, without a collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.contract.errors import TrainingError
from trainer.contract.options import Training
from trainer.data.loader import MicroBatch
from trainer.data.seeds import keep_random_state
from trainer.engine.accelerator import batch_copy
from trainer.engine.ddp_model import keep_buffers, unwrap
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss


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


class BatchTrial:
    """Trial of a batch's forward and backward pass, which changes nothing: its gradients are dropped."""

    def __init__(
        self, task: Task, model: nn.Module, ctx: WorkerContext, *, autocast: AbstractContextManager[Any]
    ) -> None:
        self._task, self._model, self._autocast = task, model, autocast
        self._rank, self._to_device = ctx.rank, batch_copy(ctx.device)

    def most_samples(self, micro: MicroBatch) -> int:
        """Return the most samples of a batch that the memory holds: all of them, or fewer to within a sixteenth.

        Raises:
            OutOfMemoryError: it does not hold one sample, or the batch cannot be divided.
        """
        fits, fails = 0, micro.samples + 1
        samples = micro.samples
        while problem := self._problem(micro.batch if samples == micro.samples else _slice(micro, 0, samples)):
            if samples == 1:
                raise OutOfMemoryError(f"the memory of rank {self._rank} does not hold one sample: {problem}")
            if not divides(micro):
                raise OutOfMemoryError(
                    f"the memory of rank {self._rank} does not hold its share of {samples} samples, a batch that "
                    f"cannot be divided, as not all in it are tensors of {samples} rows: {problem}"
                )
            fails, samples = samples, samples // 2
        fits = samples
        while fails - fits > max(1, fails // 16) and fits < micro.samples:
            samples = (fits + fails) // 2
            if self._problem(_slice(micro, 0, samples)):
                fails = samples
            else:
                fits = samples
        return fits

    def _problem(self, batch: Any) -> str:
        """Return the message with which memory ran out; empty if it did not."""
        problem = ""
        try:
            self._run(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"{shapes(batch)}: {(str(error) or type(error).__name__).splitlines()[0]}"
        finally:
            self._model.zero_grad(set_to_none=True)
        if problem:  # the error held the tensors of the pass
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return problem

    def _run(self, batch: Any) -> None:
        model = self._model
        alone = model.no_sync() if isinstance(model, DDP) else nullcontext()
        with keep_random_state(), keep_buffers(unwrap(model)), alone:
            with self._autocast:
                loss, _, _ = summed_loss(self._task, model, self._to_device(batch))
            loss.backward()  # type: ignore[no-untyped-call]


def divides(micro: MicroBatch) -> bool:
    """Return whether a batch can be divided by samples: all in it are tensors with one row for each."""
    return all(isinstance(leaf, Tensor) and leaf.shape[:1] == (micro.samples,) for leaf in _leaves(micro.batch))


def in_parts(micro: MicroBatch, most: int) -> list[MicroBatch]:
    """Return a batch in parts of nearly equal size, of ``most`` samples at most."""
    count = -(-micro.samples // most)
    ends = [micro.samples * part // count for part in range(count + 1)]
    return [MicroBatch(_slice(micro, low, high), high - low) for low, high in pairwise(ends)]


def _slice(micro: MicroBatch, low: int, high: int) -> Any:
    return _sliced(micro.batch, low, high)


def _sliced(batch: Any, low: int, high: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[low:high]
    if isinstance(batch, dict):
        return {key: _sliced(value, low, high) for key, value in batch.items()}
    values = [_sliced(value, low, high) for value in batch]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch
