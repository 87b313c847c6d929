"""What shows that ranks go on without a step: their children, their logs, the compiler; and what shows nothing."""

from __future__ import annotations

from typing import Any

import pytest
from test_diagnosis import SimulatedRun, balanced, starting, summaries

from trainer.contract.record import Doing, Finding, NodeSample, RankSample, RankState, Step


def watched(run: SimulatedRun, seconds: int, **values: Any) -> list[Finding]:
    """Let seconds pass, each with a sample of every rank; a list has a value per rank, a function one per second."""
    found = []
    free_bytes, silent_nodes = values.pop("free_bytes", None), values.pop("silent_nodes", ())
    for second in range(seconds):
        run.now += 1.0
        samples = []
        for rank in run.state.ranks:
            of_rank = {name: value(second) if callable(value) else value for name, value in values.items()}
            of_rank = {name: value[rank] if isinstance(value, list) else value for name, value in of_rank.items()}
            samples.append(RankSample(rank=rank, **{"cpu_percent": 0.0, **of_rank}))
        for node in sorted({rank // 2 for rank in run.state.ranks} - {*silent_nodes}):
            run.state.apply(
                NodeSample(
                    time=run.now,
                    node=node,
                    host=f"node{node}",
                    ranks=[sample for sample in samples if sample.rank // 2 == node],
                    record_free_bytes=free_bytes,
                )
            )
        found += run.diagnose()
    return found


def test_a_script_whose_children_train_is_not_stalled() -> None:
    run = starting(1, "training")
    assert watched(run, 600, children_percent=150.0) == []
    assert [finding.kind for finding in watched(run, 320, children_percent=0.0)] == ["stalled"]


@pytest.mark.parametrize("percent", [17.0, 150.0])
def test_children_that_train_after_some_steps_are_no_stall_on_a_crowded_machine_either(percent: float) -> None:
    run = SimulatedRun(1)
    run.steps(40)
    assert watched(run, 240, children_percent=percent) == []
    assert [finding.kind for finding in watched(run, 60, children_percent=0.0)] == ["stalled"]


def test_a_log_that_grows_is_activity() -> None:
    run = starting(1, "training")
    assert watched(run, 600, log_bytes=lambda second: second // 20) == []
    assert len(watched(run, 320, log_bytes=100)) == 1


def test_children_that_compute_are_named_where_a_rank_with_them_keeps_the_others_waiting() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank != 1])
    found = watched(run, 60, children_percent=[0.0, 180.0])
    assert summaries(found) == [("stalled", "raised", 1, "busy")]
    assert "the process of rank 1 waits for its child processes, which compute" in found[0].message


@pytest.mark.parametrize("load", [{"cpu_percent": 20.0, "wait_percent": 76.0}, {"cpu_percent": 8.0}])
@pytest.mark.parametrize("state", ["spawned", "ready", "training"])
def test_a_rank_that_imports_on_a_busy_machine_is_not_stalled_while_it_gets_on(
    state: str, load: dict[str, float]
) -> None:
    run = SimulatedRun(2)
    run.state.apply(RankState(time=run.now, rank=0, state=state, node=0))  # type: ignore[arg-type]
    run.state.apply(RankState(time=run.now, rank=1, state=state, node=0))  # type: ignore[arg-type]
    run.now += 2.0
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank == 0])
    assert watched(run, 120, **load) == []
    found = watched(run, 30, cpu_percent=0.0)
    assert [(finding.kind, finding.rank) for finding in found] == [("stalled", 1)], "it does nothing any more"


def compiling(run: SimulatedRun, step: int, rank: int) -> None:
    run.state.apply(
        Doing(time=run.now + 5, rank=rank, step=step, part="compile", parts_done=1, waited_ms=5e3, line="t.py:3 in f")
    )


def test_a_rank_that_compiles_is_not_stalled_however_long_it_takes_nor_those_that_wait_for_it() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    run.state.apply(Doing(time=run.now + 5, rank=0, step=41, part="sync", parts_done=4, waited_ms=5e3))
    compiling(run, 41, 1)
    assert watched(run, 900, cpu_percent=[0.0, 0.0], children_percent=[0.0, 100.0]) == []
    assert run.state.ranks[1].phase == "compile"
    (found,) = watched(run, 60)
    assert found.rank == 1
    assert found.message.startswith("rank 1 on node0 has been compiling for more than")
    assert "(t.py:3 in f)" in found.message


def test_a_step_that_compiled_is_no_measure_of_the_steps_after_it() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    compiling(run, 41, 0)
    compiling(run, 41, 1)
    run.now += 200.0
    run.steps(1)
    assert run.state.longest_stay_s["compile"] > 200.0
    assert run.state.longest_stay_s["training"] < 10.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_ends_at_once_while_another_waits_for_it_is_a_finding(ranks: int) -> None:
    run = starting(ranks, "training")
    watched(run, 3, cpu_percent=90.0)
    run.state.apply(RankState(time=run.now, rank=1, state="finished"))
    (found,) = watched(run, 40, cpu_percent=3.0)  # torch's store polls
    assert (found.kind, found.rank, found.cause) == ("stalled", 1, "left")
    assert (
        found.message == "rank 1 has ended before its first step, and the others have done no step for more than 20 s"
    )


def test_a_rank_that_works_on_after_another_has_ended_without_steps_is_no_finding() -> None:
    run = starting(2, "training")
    run.state.apply(RankState(time=run.now, rank=1, state="finished"))
    assert watched(run, 200, cpu_percent=30.0) == []


def test_ranks_that_never_meet_do_not_wait_for_one_that_has_ended_but_one_that_hangs_alone_is_found() -> None:
    run = starting(2, "training")
    watched(run, 3)
    run.state.apply(Finding(time=run.now, kind="no_process_group", message="the 2 ranks never meet"))
    run.state.apply(Step(time=run.now, rank=0, step=32, epoch=2, steps=32, samples=512, loss=0.1, step_ms=10.0))
    run.state.apply(RankState(time=run.now, rank=0, state="finished"))
    assert watched(run, 40, cpu_percent=3.0) == [], "it still imports, slowly"
    (found,) = watched(run, 300)
    assert (found.kind, found.rank) == ("stalled", None)


def test_where_the_record_s_disk_is_full_no_rank_is_called_stalled() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    watched(run, 3, free_bytes=1 << 30)
    assert watched(run, 300, free_bytes=0) == []
    run.diagnose()
    assert run.diagnose(300.0) == [], "nor where the samples are lost as well"
    found = watched(run, 30, free_bytes=1 << 30)
    assert [finding.kind for finding in found] == ["stalled"], "there is space again, and no step comes"


def all_of_a_node_behind() -> SimulatedRun:
    run = SimulatedRun(4)
    run.steps(40)
    watched(run, 3, free_bytes=1 << 30)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank in (0, 1)])
    return run


def test_where_the_samples_of_one_node_end_its_ranks_are_held_and_those_that_wait_are_not_blamed() -> None:
    run = all_of_a_node_behind()
    found = watched(run, 40, free_bytes=1 << 30, silent_nodes=(1,))
    assert summaries(found) == [("stalled", "raised", 2, "stopped"), ("stalled", "raised", 3, "stopped")]
    assert "its node agent does not run either: all processes there are held" in found[0].message
    failure = None
    while failure is None and run.now < 2000.0:
        watched(run, 1, free_bytes=1 << 30, silent_nodes=(1,))
        failure = run.diagnosis.hang(run.state, run.now, timeout_s=None, limit_s=600.0)
    assert failure is not None
    assert failure.message.startswith(
        "rank 2 on node1 hangs after step 40, as all processes there are held; the others"
    )


@pytest.mark.parametrize("silent_nodes", [(1,), (0, 1)], ids=["a gap is told", "all samples end"])
def test_a_record_that_has_ended_holds_no_rank(silent_nodes: tuple[int, ...]) -> None:
    run = all_of_a_node_behind()
    if 0 not in silent_nodes:
        run.state.apply(Finding(time=run.now, kind="record_incomplete", rank=2, message="its disk is full"))
    assert watched(run, 200, free_bytes=1 << 30, silent_nodes=silent_nodes) == []


def test_a_finding_that_stands_says_what_stays_true() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    (found,) = run.diagnose(21.9)
    assert "for more than 21 s" in found.message
