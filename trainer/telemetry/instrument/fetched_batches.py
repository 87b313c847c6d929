"""Batches of a script's DataLoaders: whether the model is trained on them, and how many samples they have."""

from __future__ import annotations

from typing import Any
from weakref import ref

from trainer.telemetry.step_tracker import BatchSize, plus, size_of


class FetchedBatches:
    """Batches since the model was last trained.

    Those that are not trained on are an evaluation's: of another iterator since the last training, or earlier ones of
    the same iterator.
    """

    def __init__(self) -> None:
        self._size: BatchSize | None = None
        """Of the batches of the step so far; None without any."""
        self._are_counted = False
        """Whether there was a batch in any step: a later step without one has no further samples."""
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
            self._size = plus(self._size, size_of(batch))
            self._are_counted = True

    def add_first(self, batch: Any) -> None:
        """Count a batch before the first backward pass: the newest one, as others may only have been looked at."""
        self._size, self._are_counted = size_of(batch), True

    @property
    def size(self) -> BatchSize:
        return self._size or (0 if self._are_counted else None, None)

    def begin_step(self) -> None:
        self._size = None

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
