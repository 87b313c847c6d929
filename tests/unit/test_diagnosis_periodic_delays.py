"""A rank for which the others wait once in so many steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis, thresholds as limit
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import finding_summary
from trainer.contract.record import Finding, Step

STEP_MS = 50.0


def diagnosed(
    late_ms: Mapping[int, tuple[int, float]],
    *,
    steps: int,
    ranks: int = 3,
    phase: str = "other",
    merged: int = 1,
    own_ms: float | None = None,
) -> list[Finding]:
    """Return the findings of a run.

    Args:
        late_ms: by step, a rank that comes later than the others, and by how much.
        steps: of the run.
        ranks: of the run.
        phase: in which it is late; at the end of the step before, which the others see in their next wait, or in it.
        merged: steps of an event.
        own_ms: by how much the forward pass of rank 1 takes longer in each step, in place of work at the delays.
    """
    state, diagnosis, findings = RunState(world_size=ranks, history=HISTORY), Diagnosis(), []
    now = 0.0
    for last in range(merged, steps + 1, merged):
        delays = [late_ms[step] for step in range(last - merged + 1, last + 1) if step in late_ms]
        ahead = 1 if phase in ("optimizer", "other") and merged == 1 else 0
        works = [late_ms[step + ahead] for step in range(last - merged + 1, last + 1) if step + ahead in late_ms]
        whole_ms = merged * STEP_MS + sum(ms for _, ms in works)
        now += whole_ms / 1e3
        for rank in state.ranks:
            own = sum(ms for late, ms in works if late == rank) / merged
            waits = sum(ms for late, ms in delays if late != rank) / merged
            phases = {"data": 1.0, "forward": 20.0, "backward": 23.0, "optimizer": 3.0, "other": 2.0}
            phases[phase] += own
            if own_ms is not None:
                phases[phase] -= own
                phases["forward"] += own_ms if rank == 1 else 0.0
                whole_ms = merged * (sum(phases.values()) + 1.0 + waits)
            event = Step(
                time=now, rank=rank, step=last, epoch=1, steps=merged, samples=8, loss=1.0, step_ms=whole_ms / merged,
                sync_exposed_ms=1.0 + waits, **{f"{name}_ms": ms for name, ms in phases.items() if name != "other"},
            )  # fmt: skip
            state.apply(event)
        findings += [each for each in diagnosis.update(state, now) if each.kind == "periodic_delay"]
    return findings


def every(distance: int, rank: int, ms: float, *, until: int) -> dict[int, tuple[int, float]]:
    return dict.fromkeys(range(distance, until + 1, distance), (rank, ms))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("merged", [1, 4])
def test_a_rank_that_is_late_once_in_so_many_steps_is_named(ranks: int, merged: int) -> None:
    (found,) = diagnosed(every(20, 1, 1500.0, until=200), steps=200, ranks=ranks, merged=merged)
    assert (found.rank, found.severity, found.state) == (1, "critical", "raised")
    assert (
        found.message == "rank 1 takes 1.5 s longer than the others once in 20 steps, and they wait for it: 60 % of "
        "the time"
    )
    assert found.evidence["every_steps"] == 20
    assert found.step == 20 * limit.DELAYS
    assert finding_summary(found) == "rank 1 slow now and then"


def test_its_phase_is_named_where_it_has_the_delay() -> None:
    (found,) = diagnosed(every(20, 2, 1500.0, until=120), steps=120, phase="optimizer")
    assert "once in 20 steps because of its optimizer step, and" in found.message
    assert found.cause == "optimizer"


def test_it_is_cleared_when_no_delay_comes_any_more() -> None:
    raised, cleared = diagnosed(every(20, 1, 1500.0, until=120), steps=200)
    assert (raised.state, cleared.state) == ("raised", "cleared")


@pytest.mark.parametrize(("late_ms", "names"), [(80.0, False), (160.0, True)])
def test_a_delay_counts_by_its_share_of_the_time(late_ms: float, names: bool) -> None:
    assert bool(diagnosed(every(20, 1, late_ms, until=200), steps=200)) is names


@pytest.mark.parametrize(
    "steps", [[20, 45, 60, 98, 110, 160], [30, 33, 36, 90, 95, 150, 153]], ids=["at random", "in bursts"]
)
def test_delays_at_unequal_distances_are_other_work_on_the_machine(steps: list[int]) -> None:
    assert diagnosed(dict.fromkeys(steps, (1, 1500.0)), steps=200) == []
    nearly = dict.fromkeys((20, 41, 60, 80, 101, 120), (1, 1500.0))
    assert len(diagnosed(nearly, steps=125)) == 1


def test_delays_of_ranks_in_turns_and_too_few_name_no_rank() -> None:
    turns = {step: (step // 20 % 3, 1500.0) for step in range(20, 300, 20)}
    assert diagnosed(turns, steps=300) == []
    assert diagnosed(every(20, 1, 1500.0, until=20 * (limit.DELAYS - 1)), steps=120) == []


def test_a_rank_that_is_late_in_each_step_is_a_straggler_alone() -> None:
    assert diagnosed(every(1, 1, 100.0, until=200), steps=200) == []


@pytest.mark.parametrize("merged", [1, 4])
@pytest.mark.parametrize(("own_ms", "names"), [(200.0, False), (20.0, True)])
def test_a_rank_that_is_late_in_each_step_has_no_periodic_delay_where_ranks_seldom_meet(
    merged: int, own_ms: float, names: bool
) -> None:
    delays = every(20, 1, 20 * 200.0, until=200)
    assert bool(diagnosed(delays, steps=200, merged=merged, own_ms=own_ms)) is names
