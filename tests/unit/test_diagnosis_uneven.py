"""Work that is uneven in turns, as against a slow link and a rank that is always late."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from test_diagnosis import PARTS, SimulatedRun, Slow, balanced, covering, late, summaries

from trainer.contract.record import Finding


def late_in_turns(step: int, rank: int) -> Mapping[str, float]:
    return {"forward": 30.0} if step % 2 == rank % 2 else {}


@dataclass
class AtRandom:
    """Ranks late at random: one of them at each step, or each for some time."""

    ranks: int
    uniform_ms: float = 0.0

    def __post_init__(self) -> None:
        self.dice, self.late, self.step = random.Random(5), 0, 0

    def __call__(self, step: int, rank: int) -> Mapping[str, float]:
        if self.uniform_ms:
            return {"backward": self.dice.uniform(0.0, self.uniform_ms)}
        if step != self.step:
            self.step, self.late = step, self.dice.randrange(self.ranks)
        return {"backward": 30.0} if rank == self.late else {}


@dataclass
class Lengths:
    """Batches of as many samples and of different lengths, or of different size."""

    name: str = "tokens"
    reported: bool = True

    def __post_init__(self) -> None:
        self.dice = random.Random(3)

    def __call__(self, step: int, rank: int) -> Mapping[str, float]:
        size = self.dice.choice([40.0, 80.0, 160.0, 320.0])
        longer = {part: PARTS[part] * size / 80.0 for part in ("forward", "backward")}
        return {**longer, self.name: size} if self.reported else longer


UNEVEN: list[tuple[int, Slow, str]] = [
    (2, late_in_turns, "unattributed"),
    (4, late_in_turns, "unattributed"),
    (4, lambda step, rank: {"data": 30.0} if step % 4 == rank else {}, "unattributed"),
    (2, AtRandom(2), "unattributed"),
    (4, AtRandom(4), "unattributed"),
    (4, AtRandom(4, uniform_ms=60.0), "unattributed"),
    (2, Lengths(), "tokens"),
    (4, Lengths(), "tokens"),
    (4, Lengths("samples"), "samples"),
    (4, Lengths(reported=False), "unattributed"),
]


@pytest.mark.parametrize("covered", [1, 6])
@pytest.mark.parametrize(("ranks", "slow", "cause"), UNEVEN)
def test_uneven_work_is_found_with_its_cause_and_never_as_a_slow_network(
    ranks: int, slow: Slow, cause: str, covered: int
) -> None:
    run = SimulatedRun(ranks, wire_ms=12.0)
    if covered == 1:
        found = run.steps(200, slow)
        over = run.steps(100)
    else:
        found = covering(run, 120, covered, slow)
        over = covering(run, 80, covered)
    # Of events that cover several steps the sizes are sums: what is left of their differences explains less.
    assert [(finding.kind, finding.state) for finding in found] == [("imbalance", "raised")]
    if covered == 1:
        assert found[0].cause == cause
    assert summaries(over) == [("imbalance", "cleared", None, found[0].cause)]


def test_the_cost_of_uneven_work_is_the_saving_by_even_work() -> None:
    (found,) = SimulatedRun(2, noise=0.0).steps(80, late_in_turns)
    assert found.evidence["imbalance_ms"] == pytest.approx(15.0)
    assert found.evidence["step_ms"] == pytest.approx(73.0)
    assert found.severity == "warning"
    assert found.message == (
        "ranks are late in turn, for a reason that the record does not show: uneven work costs 21 % of a step "
        "(15.0 of 73.0 ms)"
    )
    assert "sort" in found.advice


def test_uneven_batch_sizes_are_named_with_their_range() -> None:
    (found,) = SimulatedRun(4, noise=0.0).steps(80, Lengths())
    assert "because they get 40 to 320 tokens in a step" in found.message
    assert "the same number of tokens" in found.advice
    assert (found.evidence["least_tokens"], found.evidence["most_tokens"]) == (40.0, 320.0)


@pytest.mark.parametrize("covered", [1, 6])
def test_a_slow_link_is_no_uneven_work_and_both_are_found_where_there_are_both(covered: int) -> None:
    def found(wire_ms: float, slow: Slow) -> list[Finding]:
        run = SimulatedRun(2, wire_ms=wire_ms)
        return run.steps(100, slow) if covered == 1 else covering(run, 100, covered, slow)

    assert {each.kind for each in found(60.0, balanced)} == {"communication_bound"}
    assert {each.kind for each in found(120.0, lambda s, r: {"forward": 80.0} if s % 2 == r else {})} == {
        "communication_bound",
        "imbalance",
    }
    # The link takes the greater part of what even ranks would take, but not of the steps as they are.
    uneven = found(35.0, lambda s, r: {"forward": 60.0} if s % 2 == r else {})
    assert {each.kind for each in uneven} == {"imbalance"}


@pytest.mark.parametrize("every", [2, 5])
def test_means_over_several_steps_do_not_make_a_slow_link(every: int) -> None:
    """A record without the single values, in which ranks that take turns have waited alike."""
    run = SimulatedRun(2)
    found = []
    for _ in range(80):
        ahead: list[list[float]] = [[], []]
        for _ in range(every):
            run.step += 1
            events = run.one_step(lambda step, rank: {"forward": 400.0} if step % 2 == rank else {}, 2.0)
            for rank, event in enumerate(events):
                ahead[rank].append(event.sync_exposed_ms or 0.0)
        for event, waits in zip(events, ahead, strict=True):
            event.steps, event.sync_exposed_ms = every, sum(waits) / every
            run.state.apply(event)
        found += run.diagnose()
    assert {finding.kind for finding in found} & {"communication_bound", "imbalance"} == set()


@pytest.mark.parametrize("covered", [1, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_always_late_is_a_straggler_and_no_uneven_work(ranks: int, covered: int) -> None:
    for first in (1, 61, 90):
        run = SimulatedRun(ranks)
        slow = late(1, first=first, backward=60.0)
        found = run.steps(220, slow) if covered == 1 else covering(run, 150, covered, slow)
        assert summaries(found) == [("straggler", "raised", 1, "backward")]
