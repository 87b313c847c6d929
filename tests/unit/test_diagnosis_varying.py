"""A rank that is late by varying amounts, as by a slow loader, as against even ranks whose work varies as much."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from test_diagnosis import SimulatedRun, busy_machine, late, summaries


@dataclass
class Varying:
    """One rank, late by an amount that is drawn anew for each step, from some step on."""

    part: str
    most_ms: float
    first: int = 1
    rank: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def __call__(self, step: int, rank: int) -> Mapping[str, float]:
        return {self.part: self.dice.uniform(0.0, self.most_ms)} if rank == self.rank and step >= self.first else {}


@dataclass
class VaryingWork:
    """Work of every rank alike that varies: by an occasional long step, or for some time at once."""

    kind: str
    share: float
    levels: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(1)

    def __call__(self, step: int, rank: int) -> Mapping[str, float]:
        if self.kind == "heavy tails":  # Pareto's, with a finite mean and hardly a variance
            return {"data": 40.0 * self.share * (self.dice.paretovariate(2.0) - 1.0)}
        keeps = {"for five steps": 0.8, "for twenty steps": 0.95}[self.kind]
        level = keeps * self.levels.get(rank, 0.0) + (1 - keeps**2) ** 0.5 * self.dice.gauss(0.0, 1.0)
        self.levels[rank] = level
        return {"backward": max(0.0, 20.0 + 40.0 * self.share * level)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_a_rank_late_by_varying_amounts_is_named_with_its_part(ranks: int, part: str) -> None:
    """By 0 to 400 ms, as one that loads data from a slow disk: twelve steps differ too much to be sure of a mean."""
    run = SimulatedRun(ranks)
    found = run.steps(80, Varying(part, 400.0))
    assert set(summaries(found)) == {("straggler", "raised", 1, part)}
    assert found[0].step is not None
    assert found[0].step <= 60
    assert found[0].evidence["excess_ms"] == pytest.approx(200.0, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_becomes_late_by_varying_amounts_is_named_until_it_is_even(seed: int) -> None:
    run = SimulatedRun(2, seed=seed)
    assert run.steps(60) == []
    found = run.steps(200, Varying("data", 400.0, first=61, seed=seed))
    assert set(summaries(found)) == {("straggler", "raised", 1, "data")}
    assert found[0].step is not None
    assert found[0].step <= 60 + 30
    assert summaries(run.steps(80)) == [("straggler", "cleared", 1, "data")]


def test_parts_of_a_varying_lateness_are_told_with_that_of_their_steps() -> None:
    dice = random.Random(1)

    def slow(step: int, rank: int) -> Mapping[str, float]:
        half_ms = dice.uniform(0.0, 200.0) if rank == 1 else 0.0
        return {"forward": half_ms, "backward": half_ms}

    run = SimulatedRun(2)
    run.steps(60)
    found, *_ = run.steps(250, slow)
    parts = re.search(r"reason: forward \+(.*) ms, backward \+(.*) ms in the steps that take (.*) ms", found.message)
    assert parts is not None, found.message
    forward, backward, late_ms = map(float, parts.groups())
    assert forward + backward == pytest.approx(late_ms, rel=0.1)


def test_a_rank_late_by_varying_amounts_is_named_on_a_busy_machine() -> None:
    busy, slow = busy_machine(3, bursts=True), Varying("data", 400.0)
    found = SimulatedRun(2, noise=0.15).steps(80, lambda step, rank: {**busy(step, rank), **slow(step, rank)})
    assert set(summaries(found)) == {("straggler", "raised", 1, "data")}


@pytest.mark.parametrize(("even", "named"), [((), 25), ((15,), 30), ((12, 15), 34)])
def test_the_steps_in_which_a_rank_is_late_are_too_many_for_chance(even: tuple[int, ...], named: int) -> None:
    """After five steps of the start: 20 of 20, 24 of 25 or 27 of 29 rows, which chance does in one of a million."""
    run = SimulatedRun(2)

    def alternating(step: int, rank: int) -> Mapping[str, float]:
        return {"data": 30.0 if step % 2 else 400.0} if rank == 1 and step not in even else {}

    assert run.steps(named - 1, alternating, every=1) == []
    assert summaries(run.steps(1, alternating)) == [("straggler", "raised", 1, "data")]


@pytest.mark.parametrize(
    ("kind", "share"), [("heavy tails", 2.0), ("for five steps", 0.05), ("for twenty steps", 0.05)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_even_work_that_varies_in_a_thousand_steps_has_no_straggler(kind: str, share: float, ranks: int) -> None:
    run = SimulatedRun(ranks, noise=0.15)
    found = run.steps(1000, VaryingWork(kind, share), every=5)
    assert [summary for summary in summaries(found) if summary[0] == "straggler"] == []


@pytest.mark.parametrize(("wait_ms", "is_found"), [(0.0, True), (20.0, True), (150.0, False)])
def test_a_lateness_is_weighed_against_the_step_with_its_waits_for_cores(wait_ms: float, is_found: bool) -> None:
    """On a machine with far too few cores a step is mostly waiting for one, and a little more work costs nothing."""
    slow = late(1, forward=12.0)

    def waiting(step: int, rank: int) -> Mapping[str, float]:
        return {**slow(step, rank), "backward_wait": wait_ms}

    run = SimulatedRun(2)
    assert run.steps(60, waiting) == []
    found = run.steps(100, waiting)
    assert summaries(found) == [("straggler", "raised", 1, "forward")] * is_found
