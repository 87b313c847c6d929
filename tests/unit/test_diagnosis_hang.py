"""When a stalled rank is taken to hang for good: a table over simulated runs."""

from __future__ import annotations

from typing import Any

import pytest
from test_diagnosis import SimulatedRun, balanced, sampled, starting

from trainer.contract.outcome import RESTARTED
from trainer.contract.record import (
    CodeFrame,
    Failure,
    Finding,
    NodeSample,
    RankSample,
    RankStacks,
    RankState,
    ThreadStack,
)

LIMIT_S = 600.0


class HangingRun(SimulatedRun):
    """Four ranks, of which rank 2 does not do a step for which the others wait."""

    def __init__(self, *, steps: int = 40) -> None:
        super().__init__(4)
        self.steps(steps)
        self.step += 1
        self.state.apply_all([event for event in self.one_step(balanced, 2.0) if event.rank != 2])
        self.hung_at = self.now

    def wait(self, seconds: int, *, timeout_s: float | None = None, **sample: Any) -> Failure | None:
        """Pass so many seconds with a sample of rank 2 in each; return the failure at the first of them with one."""
        for _ in range(seconds):
            now = self.now + 1.0
            ranks = [RankSample(rank=2, **({"cpu_percent": 1.0} | sample))]
            self.state.apply(NodeSample(time=now, node=1, host="node1", ranks=ranks))
            self.diagnose(1.0)
            found = self.diagnosis.hang(self.state, self.now, timeout_s=timeout_s, limit_s=LIMIT_S)
            if found is not None:
                return found
        return None

    @property
    def waited_s(self) -> float:
        return self.now - self.hung_at


def test_a_hang_is_taken_to_last_by_what_the_run_has_shown() -> None:
    run = HangingRun()
    found = run.wait(100)
    assert found is not None
    assert (found.kind, found.rank, found.host, found.step) == ("stalled", 2, "node1", 40)
    assert 60.0 <= run.waited_s <= 62.0
    slow = HangingRun()
    slow.state.longest_stay_s["training"] = 30.0
    assert slow.wait(290) is None
    assert slow.wait(20) is not None


@pytest.mark.parametrize("sample", [{"cpu_percent": 90.0}, {"children_percent": 30.0}], ids=["itself", "children"])
def test_a_rank_that_works_is_not_ended_as_it_may_write_a_checkpoint(sample: dict[str, float]) -> None:
    run = HangingRun()
    assert run.wait(400, **sample) is None
    assert ("stalled", 2) in run.state.findings


def test_a_given_time_out_holds_whatever_the_rank_does() -> None:
    run = HangingRun()
    assert run.wait(19, timeout_s=20.0, cpu_percent=90.0) is None
    assert run.wait(3, timeout_s=20.0, cpu_percent=90.0) is not None


def test_a_stage_that_no_rank_has_left_before_may_last_as_long_as_a_collective() -> None:
    run = HangingRun()
    run.state.longest_stay_s.clear()
    assert run.wait(590) is None


def test_a_rank_that_waits_for_storage_while_it_saves_may_do_so_as_long_as_a_collective() -> None:
    run = HangingRun()
    run.state.longest_stay_s["saving"] = 0.1
    run.state.apply(RankState(time=run.now, rank=2, state="saving"))
    assert run.wait(590) is None
    assert ("stalled", 2) in run.state.findings
    assert run.wait(30) is not None


@pytest.mark.parametrize("file", ["/usr/lib/python3.12/pdb.py", "/v/site-packages/debugpy/_vendored/pydevd/pydevd.py"])
def test_a_rank_in_which_a_debugger_waits_does_not_hang(file: str) -> None:
    run = HangingRun()
    frames = [CodeFrame(file, 1, "wait"), CodeFrame("train.py", 8, "step", True)]
    run.state.apply(RankStacks(time=run.now, rank=2, request="1", threads=[ThreadStack("MainThread", frames)]))
    assert run.wait(400, timeout_s=20.0) is None


def test_a_traced_process_does_not_hang_and_a_stopped_one_does() -> None:
    assert HangingRun().wait(100, timeout_s=20.0, held="t") is None
    assert HangingRun().wait(100, timeout_s=20.0, held="T") is not None


def test_a_rank_that_the_next_attempt_has_not_started_yet_does_not_hang() -> None:
    run = HangingRun()
    assert run.wait(30, timeout_s=20.0, held="T") is not None
    run.state.apply(Finding(time=run.now, kind=RESTARTED, severity="info", evidence={"attempt": 1.0}))
    run.state.apply_all([RankState(time=run.now, rank=rank, state="spawned") for rank in (0, 1, 3)])
    for _ in range(40):
        run.state.apply(NodeSample(time=run.now + 1.0, node=0, host="node0"))
        run.diagnose(1.0)
        assert run.diagnosis.hang(run.state, run.now, timeout_s=20.0, limit_s=LIMIT_S) is None
    assert ("stalled", 2) not in run.state.findings
    run.state.apply(RankState(time=run.now, rank=2, state="spawned"))
    assert run.wait(30, timeout_s=20.0, held="T") is not None, "one that it has started hangs as ever"


def test_the_message_says_where_the_rank_is() -> None:
    run = HangingRun()
    frames = [CodeFrame("train.py", 8, "augment", True)]
    run.state.apply(RankStacks(time=run.now, rank=2, request="1", threads=[ThreadStack("MainThread", frames)]))
    found = run.wait(30, timeout_s=20.0)
    assert found is not None
    assert found.message.startswith("rank 2 on node1 hangs after step 40: train.py:8 in augment; the others waited 2")


@pytest.mark.parametrize(("timeout_s", "ends"), [(None, False), (20.0, True), (70.0, False)])
def test_where_no_rank_is_known_to_be_late_only_a_given_time_out_ends_a_run_that_does_nothing(
    timeout_s: float | None, ends: bool
) -> None:
    run = starting(2, "training")
    (raised,) = sampled(run, 62, 0.0, 0.0)
    assert (raised.kind, raised.rank) == ("stalled", None)
    found = run.diagnosis.hang(run.state, run.now, timeout_s=timeout_s, limit_s=LIMIT_S)
    assert (found is not None) is ends
    if found is not None:
        assert (found.kind, found.rank, found.message) == ("stalled", None, raised.message)


def test_a_run_in_which_a_rank_has_been_active_within_the_time_out_does_not_hang() -> None:
    run = starting(2, "training")
    sampled(run, 62, 0.0, 0.0)
    run.diagnosis._activity.active_at[1] = run.now - 19.0  # its finding is cleared with the next check
    assert run.diagnosis.hang(run.state, run.now, timeout_s=20.0, limit_s=LIMIT_S) is None
