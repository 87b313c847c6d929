"""Seeds every source of random numbers that data and models draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, of torch, and of numpy where this process has imported it."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)  # it takes 32 bits


class RandomNumbers:
    """Random numbers of their own for code that draws from those of the process, which stay as they were."""

    def __init__(self, seed: int) -> None:
        with self._apart():
            seed_all(seed)
            self._state = _states()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from these numbers; the next time they go on."""
        with self._apart():
            _set_states(self._state)
            yield
            self._state = _states()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw from numbers of another seed, once."""
        with self._apart():
            seed_all(seed)
            yield

    @staticmethod
    @contextmanager
    def _apart() -> Iterator[None]:
        before = _states()
        try:
            yield
        finally:
            _set_states(before)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    own, of_torch, of_numpy = states
    random.setstate(own)
    torch.set_rng_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
