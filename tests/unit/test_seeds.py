"""Random numbers: one seed for every source, and a state that comes back."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint import capture_rng, restore_rng
from trainer.data.seeds import seed_all


class Words(list[int]):
    """An array that is drawn as its numbers are needed."""

    def tolist(self) -> list[int]:
        return list(self)


class Numpy:
    """What numpy has of global random numbers; it need not be installed here."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ("MT19937", Words([0] * 624), 624, 0, 0.0)
        self.random = SimpleNamespace(seed=self.seed, get_state=lambda: self.state, set_state=self.restore)

    def seed(self, seed: int) -> None:
        assert 0 <= seed < 2**32, "numpy takes no other"
        self.state = ("MT19937", Words([seed] * 624), 624, 0, 0.0)

    def restore(self, state: tuple[Any, ...]) -> None:
        kind, words, *rest = state
        self.state = (kind, Words(words), *rest)


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> Numpy:
    stand_in = Numpy()
    monkeypatch.setitem(sys.modules, "numpy", stand_in)  # type: ignore[arg-type]
    return stand_in


def test_every_source_is_seeded(numpy: Numpy) -> None:
    drawn = []
    for seed in (2**63 + 5, 2**63 + 5, 6):
        seed_all(seed)
        drawn.append((random.random(), float(torch.rand(())), numpy.state[1][0]))
    assert drawn[0] == drawn[1]
    assert drawn[0][2] == 5
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_a_captured_state_comes_back_with_that_of_numpy(numpy: Numpy) -> None:
    seed_all(3)
    state = capture_rng()
    expected = (random.random(), float(torch.rand(())))
    seed_all(4)
    restore_rng(state)
    assert (random.random(), float(torch.rand(()))) == expected
    assert numpy.state == ("MT19937", [3] * 624, 624, 0, 0.0)


def test_a_state_from_a_process_with_numpy_is_restored_in_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numpy", Numpy())  # type: ignore[arg-type]
        state = capture_rng()
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    restore_rng(state)
