"""Batches of a script's DataLoaders: whether the model is trained on them, and how many samples they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.telemetry.step_tracker import tensors_of

BatchSize = tuple[int | None, int | None]
"""Samples and tokens; None: not known."""


class FetchedBatches:
    """Batches since the model was last trained.

    Those that are not trained on are an evaluation's: of another iterator since the last training, or earlier ones of
    the same iterator.
    """

    def __init__(self) -> None:
        self.size: BatchSize = (0, None)
        """Samples and tokens of the step so far."""
        self.are_counted = False
        """Whether the size of any batch was added."""
        self._first: BatchSize = (0, None)
        """Size of the last batch before the training began, with which it begins; zero after the first step."""
        self._leftover: tuple[BatchSize, BatchSize] | None = None
        """Size of the step so far, of the model's calls and of the batches, where an epoch ended within the step."""
        self._drops_leftover = False
        """Whether the gradients from before the epoch's end were set to zero."""
        self._fetched: set[ref[Any]] = set()
        """Data iterators that have given a batch since the model was last trained."""
        self._trained: set[ref[Any]] = set()
        """Data iterators whose batches the model was trained with."""

    def were_evaluated(self, iterator: Any) -> bool:
        """Return, when a further batch is requested, whether those before were an evaluation's; then forget them."""
        this = ref(iterator)
        evaluated = bool(self._fetched - self._trained) if this in self._trained else this in self._fetched
        if evaluated:
            self._fetched.clear()
        return evaluated

    def add(self, iterator: Any, batch: Any | None) -> None:
        self._fetched.add(ref(iterator))
        if batch is not None:
            self.are_counted = True
            self.size = plus(plus(self.size, self._first), size_of(batch))
            self._first = (0, None)

    def await_training(self, batch: Any) -> None:
        """Note a batch from before the training, which is the first one trained on if no other comes."""
        self._first = size_of(batch)

    def begin_step(self) -> None:
        self.size = self._first = (0, None)
        self._leftover, self._drops_leftover = None, False

    def end_epoch(self, called: BatchSize) -> None:
        """End an epoch within a step: fewer passes were left than a step takes; ``called``: size of these calls."""
        self._leftover = called, self.size

    def set_to_zero(self, owner: nn.Module | Optimizer) -> None:
        """Note that gradients are set to zero: those of the passes before the epoch's end train nothing then."""
        if self._leftover is not None:
            groups = [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
            self._drops_leftover |= any(each.grad is not None for group in groups for each in group["params"])

    def drop_leftover(self, called: BatchSize) -> BatchSize | None:
        """Begin a backward pass; return the size of the step's calls without what trains nothing, None if all does."""
        leftover, drops = self._leftover, self._drops_leftover
        self._leftover, self._drops_leftover = None, False
        if leftover is None or not drops:
            return None
        self.size = _minus(self.size, leftover[1])
        return _minus(called, leftover[0])

    def end(self, iterator: Any) -> bool:
        """Forget an iterator at its end; return whether its batches were an evaluation's."""
        this = ref(iterator)
        evaluated = this in self._fetched and this not in self._trained
        self._trained.discard(this)
        self._fetched.discard(this)
        return evaluated

    def train(self) -> bool:
        """Record that the model is trained on the batches; return whether one is of a new iterator: an epoch begins."""
        begins = not self._fetched <= self._trained
        if begins:
            self._trained = {iterator for iterator in self._trained | self._fetched if iterator() is not None}
        self._fetched.clear()
        return begins


def size_of(batch: Any) -> BatchSize:
    """Return the size of a batch, or of a model's arguments.

    It has samples if all of its tensors with dimensions have one leading dimension in common, and tokens, with padding,
    if the first of them is of integers [samples, tokens].
    """
    tensors = tensors_of(batch)
    first = next(tensors, None)
    if first is None or any(other.shape[0] != first.shape[0] for other in tensors):
        return None, None
    whole = first.dim() == 2 and not first.is_floating_point() and first.dtype is not torch.bool
    return first.shape[0], first.numel() if whole else None


def size_of_call(arguments: Sequence[Any], named: Mapping[str, Any]) -> BatchSize:
    """Return the size of the arguments with which a model is called."""
    first = arguments[0] if arguments and not named else None
    return size_of(first if type(first) is Tensor else [named, arguments])


def plus(one: BatchSize, other: BatchSize) -> BatchSize:
    """Return the sum of two sizes; tokens that are not known add nothing."""
    tokens = [size[1] for size in (one, other) if size[1] is not None]
    samples = None if one[0] is None or other[0] is None else one[0] + other[0]
    return samples, sum(tokens) if tokens else None


def _minus(one: BatchSize, other: BatchSize) -> BatchSize:
    samples = None if one[0] is None or other[0] is None else one[0] - other[0]
    return samples, None if one[1] is None else one[1] - (other[1] or 0)
