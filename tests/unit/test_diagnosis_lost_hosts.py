"""When a silent host is lost: a table over simulated runs of four ranks on two nodes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace
from test_diagnosis import SimulatedRun, balanced

from trainer.contract.record import Finding, RankState, Unheard

TIMEOUT_S = 30.0


class RunWithSilence(SimulatedRun):
    """The ranks of node 1 are heard of no more after 40 steps."""

    def __init__(self) -> None:
        super().__init__(4)
        self.steps(40)

    def pass_time(self, seconds: float, *, steps_of: tuple[int, ...] = ()) -> None:
        """Let the ranks of these nodes make steps."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.step += 1
            self.state.apply_all([each for each in self.one_step(balanced, 2.0) if each.rank // 2 in steps_of])
            self.diagnosis.follow(self.state, self.now)

    def lost(self, silent_s: Mapping[int, float]) -> list[int]:
        return list(self.diagnosis.lost_nodes(self.state, self.now, silent_s, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize(
    ("seconds", "steps_of", "silent_s", "lost"),
    [
        (31, (), {0: 0.0, 1: 31.0}, [1]),
        (29, (), {0: 0.0, 1: 29.0}, []),
        (60, (0,), {0: 0.0, 1: 60.0}, []),
        (60, (), {0: 60.0, 1: 60.0}, []),
        (31, (), {0: 0.0, 1: 30.0, 2: 28.5, 3: 27.5}, [1, 2]),
        (31, (), {0: 20.0, 1: 31.0}, []),
        (10, (), {0: 0.0, 1: 31.0}, []),
    ],
    ids=[
        "lost",
        "too early",
        "the others make steps",
        "no host answers",
        "two at once",
        "the other is silent too",
        "just stopped",
    ],
)
def test_a_host_is_lost_where_it_is_silent_and_the_others_wait(
    seconds: int, steps_of: tuple[int, ...], silent_s: dict[int, float], lost: list[int]
) -> None:
    run = RunWithSilence()
    run.pass_time(seconds, steps_of=steps_of)
    assert run.lost(silent_s) == lost


@pytest.mark.parametrize(
    ("stopped", "lost"),
    [([(0, [])], []), ([(0, [2, 3])], [1]), ([(0, []), (1, [2, 3])], [1])],
    ids=["they come", "they stopped", "one of two gets them"],
)
def test_a_silent_host_whose_heartbeats_come_to_the_others_is_not_lost(
    stopped: list[tuple[int, list[int]]], lost: list[int]
) -> None:
    run = RunWithSilence()
    for rank, ranks in stopped:
        run.state.apply(Unheard(time=run.now, rank=rank, ranks=ranks))
    run.pass_time(90)
    assert run.lost({0: 0.0, 1: 90.0}) == lost
    if not lost:  # ranks that were started again have not told yet
        for rank in range(4):
            run.state.apply(RankState(time=run.now, rank=rank, state="spawned", pid=1000 + rank))
        assert run.lost({0: 0.0, 1: 90.0}) == [1]


def test_hosts_that_answer_again_one_after_the_other_are_not_lost() -> None:
    run = RunWithSilence()
    silence = [
        Finding(time=run.now, kind="host_silent", rank=rank, severity="warning", message="silent") for rank in (0, 2)
    ]
    run.state.apply_all(silence)
    run.pass_time(41)
    assert run.lost({0: 0.0, 1: 41.0}) == [], "the record of the first has not followed yet"
    run.state.apply(replace(silence[0], time=run.now, state="cleared"))
    run.pass_time(14)
    assert run.lost({0: 0.0, 1: 55.0}) == []
    run.pass_time(2)
    assert run.lost({0: 0.0, 1: 57.0}) == [1]


def test_steps_that_take_long_are_waited_for() -> None:
    run = RunWithSilence()
    run.state.longest_stay_s["training"] = 40.0
    run.pass_time(70)
    assert run.lost({0: 0.0, 1: 70.0}) == []
    run.pass_time(15)
    assert run.lost({0: 0.0, 1: 85.0}) == [1]
