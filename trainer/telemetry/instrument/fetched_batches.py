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
        """Samples and tokens of the step, of the batches that came before its last backward pass."""
        self._are_counted = False
        """Whether batches tell the size of a step: any has come since the training began, or several came before."""
        self._are_shared = False
        """Whether a step was made without a new batch: several share one, or have come from elsewhere."""
        self._following: dict[ref[Any], BatchSize] = {}
        """Size of the batches since the last backward pass, by iterator: those of the next one."""
        self._before: BatchSize = (0, None)
        """Size of the last batch but one from before the training: if the script fetches ahead, it is trained on."""
        self._leftover: tuple[BatchSize, BatchSize] | None = None
        """Size of the step so far, of the model's calls and of the batches, where an epoch ended within the step."""
        self._drops_leftover = False
        """Whether the gradients from before the epoch's end were set to zero."""
        self._passed: tuple[BatchSize, BatchSize, int] | None = None
        """Size of the step up to its last backward pass, of calls and of batches, and the optimizer's steps before it;
        None of several optimizers, each of which may set only its own gradients to zero."""
        self._passed_given: set[ref[Any]] = set()
        """Data iterators that had given the batch of that pass."""
        self._is_left_out = False
        """Whether its gradients were set to zero without a step of the optimizer."""
        self._has_ended = False
        """Whether an iterator that is trained on ended in the step: a script that fetches ahead has its last batch."""
        self._ends = False
        """Whether no batch has come since an iterator ended."""
        self._fetched: set[ref[Any]] = set()
        """Data iterators that have given a batch since the model was last trained."""
        self._trained: set[ref[Any]] = set()
        """Data iterators whose batches the model was trained with."""
        self.calls = 0
        """Calls of a model in the step."""
        self._calls_before = 0
        """Calls up to its last backward pass."""
        self._are_several = False
        """Whether there were several for one backward pass of the step: on one batch, or on others."""
        self.are_needed = False
        """Whether sizes of batches are, beside those of a wrapped model's calls: it was called several times on one."""
        self.unknown = ""
        """Why the samples of a step are not known; empty if they are, or if none has several calls."""
        self._new = 0
        """Batches that have come in this step."""
        self._newest: BatchSize = (None, None)
        """Size of the newest of them."""
        self._passes_over = False
        """Whether a model was not called between two of the step: the first is passed over, or fetched ahead."""
        self._given: set[ref[Any]] = set()
        """Data iterators that have given a batch since the last backward pass."""
        self._are_unsure = False
        """Whether a call of the step may train nothing, or there is a batch without a size."""
        self._are_unsized = False
        """Whether a batch of the step came without its size, as those for the only wrapped model do."""
        self._has_any = False
        """Whether a batch has come in an earlier step of the epoch."""

    @property
    def are_same(self) -> bool:
        """Whether a step would be made on the batch of the one before."""
        return self._has_any and not self._new

    @property
    def are_trained_on(self) -> bool:
        """Whether batches have come since the model was last trained, all of iterators that it is trained on."""
        return bool(self._fetched) and self._fetched <= self._trained

    def were_evaluated(self, iterator: Any) -> bool:
        """Return, when a further batch is requested, whether those before were an evaluation's; then forget them."""
        this = ref(iterator)
        evaluated = bool(self._fetched - self._trained) if this in self._trained else this in self._fetched
        if evaluated:
            self._fetched.clear()
        return evaluated

    def add(self, iterator: Any, batch: Any | None) -> None:
        this = ref(iterator)
        self._passes_over |= this in self._fetched
        # The call in between is of a step that the script leaves out, or both are for one backward pass.
        self._are_unsure |= batch is None or (this in self._given and this not in self._fetched)
        self._fetched.add(this)
        self._given.add(this)
        self._new += 1
        self._ends = False
        self._are_unsized |= batch is None
        if batch is not None:
            self._are_counted = True
            self._newest = size_of(batch)
            self._following[this] = plus(self._following.get(this, (0, None)), self._newest)

    def await_training(self, iterator: Any, batch: Any) -> None:
        """Note a batch from before the training, which begins with the newest one of each iterator."""
        this = ref(iterator)
        self._new += 1
        self._before = self._following.get(this, (0, None))
        self._following = {each: size for each, size in self._following.items() if each() not in (None, iterator)}
        self._following[this] = size_of(batch)

    @property
    def is_called(self) -> bool:
        """Whether a model was called since the last backward pass of the step."""
        return self.calls > self._calls_before

    def call(self) -> bool:
        """Count a call; return whether there was one before it since the last backward pass."""
        self.calls += 1
        return self.calls > self._calls_before + 1

    def begin_step(self) -> None:
        self.size = (0, None)
        self._leftover, self._drops_leftover, self._has_ended = None, False, False
        self._passed, self._is_left_out = None, False
        self._has_any |= self._new > 0
        self.calls = self._calls_before = self._new = 0
        self._are_several = self._passes_over = self._are_unsure = self._are_unsized = False

    def end_step(self, called: BatchSize | None, *, is_wrapped: bool, extends: bool) -> BatchSize:
        """Return the size of the step; ``called``: that of the model's calls, None where these are not all known.

        Its samples are None where neither calls nor batches tell them. Calls of a wrapped model are known better than
        batches, unless several are made on one: it is for one backward pass, or each is of the batch's size. With
        ``extends`` it is what is added to the step before.
        """
        is_repeated = self.calls > self._new > 0
        self.are_needed |= self._are_several or is_repeated
        if extends and self.are_same:
            return 0, None
        called = None if self._are_several else called
        if is_wrapped and not self._are_several:
            # Where the script fetches ahead, the last batch has come in the step before.
            samples = self.size[0] if is_repeated and not self._ends else None
            is_one = samples and called is not None and called[0] == self.calls * samples
            return self.size if is_one else called or (None, None)
        if self._are_several and self._are_unsure:
            self.unknown = "a step calls a model on several batches of a DataLoader for one backward pass"
            return None, None
        if self._are_unsized:  # another model than the wrapped one is trained from this step on
            return called or (None, None)
        if self.size[0] == 0 and self._has_ended and self._are_counted and not self._are_shared:
            # The script fetches ahead: this step's batch was counted in the step before, only the first one not.
            before, self._before = self._before, (0, None)
            return before
        before, newest = _minus(self.size, self._newest), self._newest[0]
        if self._passes_over and newest and (called[0] == newest if called is not None else before[0] != newest):
            self._before = before  # if it is fetched ahead, that of the epoch's last step
            return self._newest
        if called is not None and not self.size[0] and not self._has_ended:
            self._are_shared = True
        if self.size[0] and (called is None or (self._are_counted and not self._are_shared)):
            return self.size
        if called is not None:
            return called
        if self._are_counted or self.size[0]:
            return self.size
        if self.calls > 1:
            self.unknown = "a step calls several models, or one several times, and no DataLoader gives its batch"
        return None, None

    def end_epoch(self, called: BatchSize) -> None:
        """End an epoch within a step: fewer passes were left than a step takes; ``called``: size of these calls."""
        self._leftover = called, self.size

    def set_to_zero(self, owner: nn.Module | Optimizer, optimizer_steps: int) -> None:
        """Note that gradients are set to zero: those of the passes before the epoch's end train nothing then.

        Nor do those of earlier batches that the optimizer has made no step of: a script leaves out a loss that is NaN.
        """
        is_left_out = self._passed is not None and self._passed[2] == optimizer_steps
        if self._leftover is not None or is_left_out:
            groups = [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
            has_any = any(each.grad is not None for group in groups for each in group["params"])
            self._drops_leftover |= has_any
            self._is_left_out |= has_any and is_left_out

    def begin_backward(self, called: BatchSize, optimizer_steps: int, *, alone: bool) -> BatchSize | None:
        """Return the size of the step's calls without what trains nothing, None if all does.

        ``alone``: whether the script has one optimizer.
        """
        self._are_several |= self.calls > self._calls_before + 1
        self._calls_before = self.calls
        # Another pass on the same batch may follow gradients that the script has kept.
        if self._passed and self._is_left_out and not self._leftover and self._given & self._passed_given:
            self._leftover = self._passed[:2]
        self._passed_given, self._given = self._given, set()
        # A call has the batch of one iterator; else in the first step it is known better than the batch of before it.
        self._are_counted |= len(self._following) > 1
        for size in self._following.values():
            self.size = plus(self.size, size)
        self._following.clear()
        leftover, drops = self._leftover, self._drops_leftover
        self._leftover, self._drops_leftover, self._is_left_out = None, False, False
        kept = None
        if leftover is not None and drops:
            self.size, kept = _minus(self.size, leftover[1]), _minus(called, leftover[0])
        self._passed = (called if kept is None else kept, self.size, optimizer_steps) if alone else None
        return kept

    def end(self, iterator: Any) -> bool:
        """Forget an iterator at its end; return whether its batches were an evaluation's."""
        this = ref(iterator)
        evaluated = this not in self._trained
        if evaluated:
            self._following.pop(this, None)
        else:
            self._has_ended, self._ends, self._has_any = True, True, False
            self._passes_over |= this in self._following
        self._trained.discard(this)
        self._fetched.discard(this)
        return evaluated

    def end_untrained(self, iterator: Any) -> None:
        """Forget an iterator that has ended before the training began."""
        self._following.pop(ref(iterator), None)

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
