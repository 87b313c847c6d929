from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from trainer.engine.agreement import NONE, Agreement, LoopRequests


@dataclass
class SimulatedRanks:
    """Ranks in one process: what one begins is complete once all have begun it."""

    step_s: float
    count: int = 3
    now: float = 0.0
    begun: list[list[Sequence[int]]] = field(default_factory=list)
    requests: dict[int, LoopRequests] = field(default_factory=dict)
    most_updates: int = 1 << 30
    rounds: list[int] = field(default_factory=list)
    """Which collective each rank is at."""
    ranks: list[Agreement] = field(default_factory=list)
    update: int = 0

    def __post_init__(self) -> None:
        self.rounds = [0] * self.count
        for rank in range(self.count):
            self.ranks.append(
                Agreement(
                    self._begin(rank),
                    lambda rank=rank: self.requests.get(rank, NONE),  # type: ignore[misc]
                    leads=rank == 0,
                    most_updates=self.most_updates,
                    now=lambda rank=rank: self.now * (1 + rank),  # type: ignore[misc]
                )
            )

    def _begin(self, rank: int) -> Callable[[Sequence[int]], Callable[[], list[int]]]:
        def begin(values: Sequence[int]) -> Callable[[], list[int]]:
            index = self.rounds[rank]
            self.rounds[rank] += 1
            if index == len(self.begun):
                self.begun.append([])
            self.begun[index].append(values)

            def result() -> list[int]:
                assert len(self.begun[index]) == self.count, "all ranks take part"
                return [max(column) for column in zip(*self.begun[index], strict=True)]

            return result

        return begin

    def step(self) -> list[LoopRequests]:
        self.update += 1
        self.now += self.step_s
        return [rank.after(self.update) for rank in self.ranks]


@pytest.mark.parametrize("step_s", [0.0001, 0.003, 0.05, 0.4, 3.0])
@pytest.mark.parametrize("requester", [0, 2])
def test_a_request_of_one_rank_is_met_by_all_after_the_same_update(step_s: float, requester: int) -> None:
    ranks = SimulatedRanks(step_s)
    for _ in range(int(20 / step_s) if step_s < 1 else 20):
        assert ranks.step() == [NONE] * 3
    ranks.requests[requester] = LoopRequests(stop=True)
    requested_at = ranks.now
    while (agreed := ranks.step()) == [NONE] * 3:
        pass
    assert agreed == [LoopRequests(stop=True)] * 3
    assert ranks.now - requested_at <= max(0.5, step_s) * 1.1 + 2 * step_s


@pytest.mark.parametrize("step_s", [0.0005, 0.003, 0.02])
def test_agreements_are_about_half_a_second_apart(step_s: float) -> None:
    ranks = SimulatedRanks(step_s)
    while ranks.now < 60:
        ranks.step()
    assert 100 <= len(ranks.begun) <= 140


def test_numbers_are_agreed_on_by_maximum_after_a_few_updates_at_most() -> None:
    ranks = SimulatedRanks(0.0005, most_updates=4)
    for _ in range(1000):
        ranks.step()
    assert 240 <= len(ranks.begun) <= 260
    ranks.requests = {rank: LoopRequests(numbers=[rank == 0, 7 * rank, 9 - rank]) for rank in range(3)}
    agreed = [ranks.step() for _ in range(6)]
    assert [LoopRequests(numbers=(1, 14, 9))] * 3 in agreed


def test_after_updates_that_have_become_longer_the_next_agreement_comes_at_once() -> None:
    ranks = SimulatedRanks(0.001)
    while ranks.now < 10:
        ranks.step()
    for rank in ranks.ranks:
        rank.reschedule(ranks.update)
    before = len(ranks.begun)
    ranks.step_s = 5.0
    ranks.step()
    assert len(ranks.begun) == before + 1
    ranks.requests[1] = LoopRequests(stop=True)
    assert [ranks.step()[0].stop for _ in range(2)] == [False, True]


def test_close_waits_for_the_collective_in_flight() -> None:
    ranks = SimulatedRanks(0.1)
    ranks.step()
    for rank in ranks.ranks:
        rank.close()
        rank.close()
    assert len(ranks.begun) == 1
