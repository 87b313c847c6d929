"""Seed and save the random number generators of Python, torch and numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed the generators of Python and torch, and that of numpy if this process has imported it."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)  # it takes 32 bits


class RandomNumbers:
    """Separate random state for code that draws from the global generators; theirs is restored afterwards."""

    def __init__(self, seed: int) -> None:
        with keep_random_state():
            seed_all(seed)
            self._state = _states()

    def state_dict(self) -> dict[str, Any]:
        """Return this state, without that of a GPU, as a checkpoint holds it."""
        (version, words, gauss), of_torch, _, of_numpy = self._state
        state: dict[str, Any] = {"python": [version, torch.tensor(words), gauss], "torch": of_torch}
        if of_numpy is not None:
            kind, keys, *rest = of_numpy
            state["numpy"] = [str(kind), torch.tensor(keys.tolist()), *map(float, rest)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved state."""
        (version, words, gauss), (_, _, of_gpu, of_numpy) = state["python"], self._state
        if of_numpy is not None and "numpy" in state:
            kind, keys, position, has_gauss, cached = state["numpy"]
            of_numpy = (kind, keys.tolist(), int(position), int(has_gauss), cached)
        self._state = ((version, tuple(words.tolist()), gauss), state["torch"], of_gpu, of_numpy)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Install this state while the block runs; the next block continues it."""
        with keep_random_state():
            _set_states(self._state)
            yield
            self._state = _states()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the generators for one block; this state is not used."""
        with keep_random_state():
            seed_all(seed)
            yield


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the global generators of Python, torch, the current GPU and numpy after the block."""
    before = _states()
    try:
        yield
    finally:
        _set_states(before)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.get_rng_state(),
        # torch.manual_seed seeds the GPU too, from which dropout draws.
        torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        None if numpy is None else numpy.random.get_state(),
    )


def _set_states(states: tuple[Any, ...]) -> None:
    own, of_torch, of_gpu, of_numpy = states
    random.setstate(own)
    torch.set_rng_state(of_torch)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
