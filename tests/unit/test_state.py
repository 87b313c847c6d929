from __future__ import annotations

import functools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gputrain_tui.state import WINDOW, RunState
from gputrain_tui.state.checksums import OPEN_CHECKS
from gputrain_tui.state.figures import run_figures
from gputrain_tui.state.synchronisation import wire_ms
from gputrain_tui.state.totals import PHASES, ZERO_TOTALS
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import (
    AnyEvent,
    Checksum,
    Failure,
    Finding,
    GpuSample,
    Joining,
    Lost,
    NodeSample,
    Queued,
    RankSample,
    RankState,
    RunEnded,
    RunStarted,
    Step,
    TrainingPlan,
)


def step(rank: int = 0, number: int = 1, *, time: float | None = None, steps: int = 1, **values: Any) -> Step:
    base: dict[str, Any] = {"samples": 8 * steps, "loss": 2.0, "step_ms": 100.0}
    return Step(
        time=float(number) if time is None else time,
        rank=rank,
        step=number,
        epoch=1,
        steps=steps,
        **{**base, **values},
    )


def fold(*events: AnyEvent, world_size: int = 2) -> RunState:
    state = RunState(world_size=world_size)
    state.apply_all(events)
    return state


def test_the_version_moves_with_every_event() -> None:
    state = RunState()
    before = state.version
    state.apply(step())
    assert state.version > before


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"step_ms": 100.0}, {"samples_per_s": 80.0, "compute_share": None, "mean_exposed_ms": None}),
        (
            {
                "step_ms": 100.0,
                "data_ms": 5.0,
                "h2d_ms": 5.0,
                "forward_ms": 20.0,
                "backward_ms": 40.0,
                "optimizer_ms": 5.0,
                "sync_exposed_ms": 25.0,
            },
            {"compute_share": 0.6, "sync_ms": 25.0, "data_ms": 10.0, "other_ms": 0.0, "whole_ms": 100.0},
        ),
        ({"step_ms": None}, {"samples_per_s": None, "mean_step_ms": None, "loss": 2.0, "loss_steps": 1}),
        ({"loss": None}, {"loss": 0.0, "loss_steps": 0}),
    ],
    ids=["durations alone", "all parts", "no durations", "no loss"],
)
def test_shares_are_of_the_measured_time(values: dict[str, float], expected: dict[str, float | None]) -> None:
    totals = fold(step(**values)).ranks[0].totals
    for name, value in expected.items():
        assert getattr(totals, name) == (None if value is None else pytest.approx(value)), name


def test_steps_without_sync_times_do_not_dilute_the_sync_share() -> None:
    known = {"forward_ms": 10.0, "backward_ms": 30.0, "other_ms": 10.0}
    state = fold(step(number=1, sync_exposed_ms=50.0, **known), step(number=2, **known))
    assert state.ranks[0].totals.share("sync") == pytest.approx(0.5)


DURATION = st.floats(0, 1e4)
ABSENT_OR_LONG = st.none() | DURATION


@st.composite
def any_step(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the times of a step event: all of them, or without the synchronisation or any other."""
    names = ("data_ms", "h2d_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms", "sync_exposed_ms")
    times = {name: draw(DURATION) for name in names}
    whole = sum(times.values()) + draw(st.sampled_from((0.0, 0.0, 100.0)))
    steps = draw(st.integers(1, 4))
    dropped = draw(st.sampled_from(((), ("sync_exposed_ms",), ("sync_exposed_ms", "backward_ms"))))
    dropped += tuple(draw(st.lists(st.sampled_from((*names, "step_ms")), max_size=2)))
    times = {name: value for name, value in times.items() if name not in dropped}
    waits = None
    if steps > 1 and "sync_exposed_ms" in times and draw(st.booleans()):
        waits = [None, *[times["sync_exposed_ms"]] * (steps - 1)]
    return {"steps": steps, "step_ms": None if "step_ms" in dropped else whole, "sync_exposed_ms_each": waits, **times}


@given(st.lists(any_step(), max_size=8), st.integers(0, 8))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_shares_of_any_record_and_any_window_of_it_add_up_to_one(steps: list[dict[str, Any]], begin: int) -> None:
    state, before = RunState(world_size=1), ZERO_TOTALS
    for number, times in enumerate(steps, 1):
        if number - 1 == begin:
            before = state.ranks[0].totals
        state.apply(step(number=4 * number, **times))
    for sums in (state.ranks[0].totals, state.ranks[0].totals.since(before)):
        shares = [sums.share(phase) for phase in PHASES]
        known = [share for share in shares if share is not None]
        assert all(-1e-6 <= share <= 1 + 1e-6 for share in known)
        if sums.whole_ms > 1e-3:
            assert sum(known) == pytest.approx(1.0, abs=1e-6)
            assert sums.compute_share == pytest.approx((shares[1] or 0.0) + (shares[2] or 0.0))
        else:
            assert bool(known) == (sums.whole_ms > 0.0)


def test_an_event_of_several_steps_counts_for_each_of_them() -> None:
    state = fold(step(number=1, loss=1.0, step_ms=10.0), step(number=4, steps=3, loss=5.0, step_ms=50.0))
    totals = state.ranks[0].totals
    assert (totals.steps, totals.samples) == (4, 32)
    assert (totals.loss, totals.loss_steps) == (pytest.approx(16.0), 4)
    assert totals.mean_step_ms == pytest.approx(40.0)


def test_recent_means_forget_steps_older_than_the_window() -> None:
    events = [step(number=n, loss=9.0) for n in range(1, 11)]
    events += [step(number=10 + n, loss=1.0) for n in range(1, WINDOW + 1)]
    view = fold(*events).ranks[0]
    assert view.recent.loss == pytest.approx(WINDOW)
    assert view.recent.steps == view.recent.loss_steps == WINDOW
    assert view.totals.steps == WINDOW + 10


def test_all_ranks_together_process_the_sum_of_their_rates() -> None:
    assert run_figures(fold(step(0), step(1)).ranks.values()).samples_per_s == pytest.approx(160.0)


def test_progress_is_that_of_the_rank_furthest_behind() -> None:
    state = fold(step(0, 10), step(1, 8))
    state.apply(TrainingPlan(time=0.0, world_size=2, updates_per_epoch=5, samples_per_epoch=80, max_epochs=4))
    assert state.step == 8
    assert state.updates_total == 20
    assert state.progress == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("max_updates", "max_epochs", "total"),
    [(0, 0, None), (30, 0, 30), (0, 2, 20), (30, 2, 20), (15, 2, 15)],
)
def test_the_nearer_limit_ends_the_training(max_updates: int, max_epochs: int, total: int | None) -> None:
    plan = TrainingPlan(
        time=0.0,
        world_size=2,
        updates_per_epoch=10,
        samples_per_epoch=160,
        max_updates=max_updates,
        max_epochs=max_epochs,
    )
    assert fold(plan).updates_total == total


def test_the_time_left_follows_the_pace_of_wall_time() -> None:
    state = RunState(world_size=1, max_updates=100)
    state.apply_all(step(number=n, time=1000.0 + 2 * n) for n in range(1, 41))
    assert state.updates_per_s == pytest.approx(0.5)
    assert state.eta_s == pytest.approx(120.0)


def test_the_time_left_is_unknown_before_two_marks_or_without_a_limit() -> None:
    assert RunState(world_size=1, max_updates=5).eta_s is None
    assert fold(*(step(number=n) for n in range(1, 9))).eta_s is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_rank_with_the_smallest_exposed_wait_is_the_late_one(world_size: int) -> None:
    waits = {0: 40.0, 1: 8.0, 2: 39.0}
    events = [step(r, n, sync_exposed_ms=waits[r]) for n in range(1, 6) for r in range(world_size)]
    state = fold(*events, world_size=world_size)
    assert state.lateness()[1] == pytest.approx(32.0)
    assert state.lateness()[0] == pytest.approx(0.0)
    assert state.latest() == (1, pytest.approx(32.0))


def test_lateness_compares_the_same_step_however_the_files_are_read() -> None:
    events = [step(0, n, sync_exposed_ms=10.0 * n) for n in range(1, 4)]
    events += [step(1, n, sync_exposed_ms=0.0) for n in range(1, 4)]
    assert fold(*events).lateness()[1] == pytest.approx(20.0)


def test_merged_steps_are_compared_by_the_means_of_their_windows() -> None:
    state = fold(
        step(0, 5, steps=5, sync_exposed_ms=10.0),
        step(1, 3, steps=3, sync_exposed_ms=2.0),
        step(1, 5, steps=2, sync_exposed_ms=4.5),
    )
    assert state.lateness() == {0: 0.0, 1: pytest.approx(7.0)}


def test_lateness_of_older_steps_is_forgotten() -> None:
    single = [step(r, n, sync_exposed_ms=40.0 * (r == 0)) for n in range(1, 6) for r in (0, 1)]
    merged = [step(r, n, steps=50, sync_exposed_ms=4.0 * (r == 1)) for n in range(50, 50 * 60, 50) for r in (0, 1)]
    assert fold(*single, *merged).latest() == (0, pytest.approx(4.0))


def test_the_slowest_rank_is_the_straggler_that_was_found_though_those_that_wait_for_its_buffers_are_as_late() -> None:
    waits = {0: 1.0, 1: 1.2, 2: 9.0}
    state = fold(*(step(r, n, sync_exposed_ms=waits[r]) for n in range(1, 6) for r in range(3)), world_size=3)
    assert state.latest() == (0, pytest.approx(8.0))
    evidence = {"followers": 1.0, "forward_wait_ms": 30.0}
    state.apply(Finding(time=2.0, kind="straggler", rank=1, evidence=evidence))
    assert state.latest() == (1, pytest.approx(30.0))
    assert state.lateness()[1] == pytest.approx(30.0), "the table has the same figure"
    state.apply(Finding(time=3.0, kind="straggler", rank=1, state="cleared"))
    assert state.latest() == (0, pytest.approx(8.0))


def test_lost_events_are_a_finding_of_the_run_until_its_end() -> None:
    state = fold(step(0, 1))
    assert state.record_gap == ""
    state.apply(Lost(time=2.0, rank=0, events=7, message="No space left on device"))
    assert state.record_gap == "7 events were not recorded: No space left on device"
    assert ("record_incomplete", None) in state.findings
    message = "the disk of the run directory is full: the end of the record is missing"
    state.apply(RunEnded(time=3.0, status="finished", exit_code=0, message=message))
    assert state.record_gap == message


def test_one_rank_alone_is_never_the_slowest() -> None:
    assert fold(step(sync_exposed_ms=1.0), world_size=1).latest() is None


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    state = RunState(world_size=2)
    held = []
    tracemalloc.start()
    for first in (1, 2501):  # the interpreter keeps up to 2,000 freed tuples
        state.apply_all(step(0, n, sync_exposed_ms=1.0) for n in range(first, first + 2500))
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[1] <= 1.1 * held[0]


def test_a_run_lists_ranks_that_have_joined_and_those_missing() -> None:
    state = RunState()
    state.apply(RunStarted(time=1.0, run="r", recipe="demo", world_size=3, run_dir="/r"))
    assert (state.status, state.joined, state.missing) == ("starting", [], [0, 1, 2])
    state.apply(Joining(time=2.0, joined=[0, 2], missing=[1], waited_ms=900.0))
    assert (state.joined, state.missing) == ([0, 2], [1])
    state.apply(RankState(time=3.0, rank=1, state="ready"))
    assert state.missing == []


def test_a_rank_keeps_the_fields_of_its_first_report() -> None:
    state = fold(
        RankState(time=1.0, rank=1, state="spawned", node=1, host="b", pid=7, local_rank=0, device="cpu"),
        RankState(time=2.0, rank=1, state="training"),
    )
    view = state.ranks[1]
    assert (view.state, view.node, view.host, view.pid, view.device) == ("training", 1, "b", 7, "cpu")


def test_steps_read_after_a_failure_in_another_file_do_not_revive_the_rank() -> None:
    state = fold(Failure(time=9.0, kind="signal", rank=1, message="killed"), step(1, 3, time=8.0))
    assert state.ranks[1].state == "failed"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_root_cause_is_the_earliest_failure_that_is_no_consequence(order: tuple[int, ...]) -> None:
    failures = [
        Failure(time=5.0, kind="lost_peer", rank=0, message="connection closed"),
        Failure(time=6.0, kind="exception", rank=2, message="ValueError"),
        Failure(time=7.0, kind="signal", rank=1, message="killed"),
    ]
    state = fold(*(failures[index] for index in order), world_size=3)
    assert state.root_cause is failures[1]


def test_of_ranks_that_fail_with_the_text_that_the_run_ends_with_the_first_is_the_cause() -> None:
    first, second = (Failure(time=5.0 + rank, kind="non_finite", rank=rank, message="loss is NaN") for rank in (0, 1))
    ended = RunEnded(time=9.0, status="failed", exit_code=1, message="loss is NaN; processes left: 7")
    assert fold(second, first, ended).root_cause is first
    later = Failure(time=8.0, kind="non_finite", rank=1, message="loss is NaN")
    restarted = Finding(time=7.0, kind=RESTARTED, message="the ranks start again")
    assert fold(first, second, restarted, later, ended).root_cause is later


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_tensors_of_unequal_size_are_the_cause_of_the_connections_that_are_lost_then(order: tuple[int, int]) -> None:
    # The times are of two hosts: the rank that was aborted may tell of it later than those that lost it.
    text = "the process was ended by SIGABRT: the ranks called a collective with tensors of unequal size"
    failures = [
        Failure(time=5.0, kind="lost_peer", rank=0, message="the connection to another rank was lost"),
        Failure(time=5.1, kind="lost_peer", rank=1, message=text),
    ]
    assert fold(*(failures[index] for index in order)).root_cause is failures[1]


def test_a_lost_peer_is_the_cause_without_a_better_one() -> None:
    failure = Failure(time=5.0, kind="lost_peer", rank=0, message="connection closed")
    assert fold(failure).root_cause is failure


def test_findings_are_raised_and_cleared_per_kind_and_rank() -> None:
    state = fold(
        Finding(time=1.0, kind="straggler", rank=1),
        Finding(time=2.0, kind="straggler", rank=0),
        Finding(time=3.0, kind="straggler", rank=1, state="cleared"),
    )
    assert list(state.findings) == [("straggler", 0)]
    assert len(state.past_findings) == 3


def test_memory_is_that_of_the_gpu_where_there_is_one() -> None:
    state = fold(
        NodeSample(
            time=1.0,
            node=0,
            host="a",
            ranks=[RankSample(rank=0, rss_bytes=100), RankSample(rank=1, rss_bytes=200)],
            gpus=[GpuSample(index=0, uuid="GPU-1", rank=0, memory_used_bytes=5000)],
        )
    )
    assert [view.memory_bytes for view in state.ranks.values()] == [5000, 200]


def test_the_peak_memory_is_that_of_gpu_tensors_or_the_greatest_process_sample() -> None:
    def sample(time: float, *sizes: int) -> NodeSample:
        ranks = [RankSample(rank=rank, rss_bytes=size) for rank, size in enumerate(sizes)]
        return NodeSample(time=time, node=0, host="a", ranks=ranks)

    state = fold(sample(1.0, 100, 200), sample(2.0, 300, 250), sample(3.0, 120, 210), step(0, 1))
    assert [view.memory_peak_bytes for view in state.ranks.values()] == [300, 250]
    on_gpu = step(0, 2)
    on_gpu.memory_peak_bytes = 9000
    state.apply(on_gpu)
    assert state.ranks[0].memory_peak_bytes == 9000


@pytest.mark.parametrize(
    ("sums", "agree"),
    [
        ([], None),
        ([(5, "a")], None),
        ([(5, "a"), (5, "a")], True),
        ([(5, "a"), (5, "b")], False),
        ([(5, "a"), (6, "a")], None),
    ],
)
def test_ranks_agree_when_their_checksums_of_one_step_are_equal(
    sums: list[tuple[int, str]], agree: bool | None
) -> None:
    events = [
        Checksum(time=1.0, rank=rank, step=number, parameters=text, buffers="")
        for rank, (number, text) in enumerate(sums)
    ]
    assert fold(*events).desync.equal is agree


def checksums(*values: tuple[int, int, str, str]) -> list[Checksum]:
    return [Checksum(time=1.0, rank=r, step=step, parameters=p, buffers=b) for r, step, p, b in values]


def test_checksums_are_compared_step_by_step_however_far_the_ranks_are_apart() -> None:
    state = fold(*checksums((0, 100, "a", ""), (0, 200, "b", ""), (0, 300, "d", "")), world_size=2)
    assert state.desync.equal is None
    state.apply_all(checksums((1, 100, "a", "")))
    assert state.desync.equal is True
    state.apply_all(checksums((1, 200, "c", "")))
    assert state.desync.difference == (200, "parameters", (1,))
    state.apply_all(checksums((1, 300, "d", "")))
    assert (state.desync.equal, state.desync.difference) == (True, None)


def test_those_that_hold_something_else_than_the_most_stand_apart() -> None:
    values = [(0, 9, "b", "x"), (1, 9, "a", "x"), (2, 9, "a", "x"), (3, 9, "c", "y")]
    assert fold(*checksums(*values), world_size=4).desync.difference == (9, "parameters", (0, 3))
    values = [(0, 9, "a", "x"), (1, 9, "a", "y")]
    assert fold(*checksums(*values), world_size=2).desync.difference == (9, "buffers", (1,))


def test_a_checksum_from_before_a_restart_is_not_compared() -> None:
    state = fold(step(rank=1, number=290, time=1.0), *checksums((1, 300, "before", "")), world_size=2)
    state.apply(RankState(time=2.0, rank=1, state="spawned"))
    state.apply_all(checksums((0, 300, "after", "")))
    assert state.desync.equal is None
    state.apply_all(checksums((1, 300, "after", "")))
    assert state.desync.equal is True


def test_checksums_without_those_of_the_other_ranks_are_not_kept_for_ever() -> None:
    state = fold(*checksums(*((0, step, "a", "") for step in range(OPEN_CHECKS + 10))), world_size=2)
    state.apply_all(checksums((1, 0, "a", "")))
    assert state.desync.equal is None
    state.apply_all(checksums((1, OPEN_CHECKS + 9, "a", "")))
    assert state.desync.equal is True


def test_a_restarted_rank_begins_its_windows_anew_and_keeps_its_totals() -> None:
    state = fold(
        *(step(0, n, step_ms=10.0) for n in range(1, 6)),
        RankState(time=9.0, rank=0, state="spawned", pid=2),
        step(0, 3, time=10.0, step_ms=30.0),
    )
    view = state.ranks[0]
    assert view.recent.mean_step_ms == pytest.approx(30.0)
    assert view.totals.steps == 6
    assert view.step == 3


def test_a_run_whose_next_job_waits_is_queued_until_its_ranks_record_again() -> None:
    state = RunState()
    started = functools.partial(RunStarted, run="r", recipe="r", run_dir="/r", world_size=1)
    seen = []
    for event in (
        Queued(time=1.0, job=7),
        started(time=2.0),
        step(time=3.0),
        Queued(time=4.0, job=7, reason="BeginTime"),
        started(time=5.0),
        step(number=2, time=6.0),
        Queued(time=0.5, job=7),  # of another file, which is read later
    ):
        state.apply(event)
        seen.append(state.status)
    assert seen == ["queued", "starting", "running", "queued", "running", "running", "running"]
    assert state.queue.jobs == 2


def test_a_job_has_progressed_once_its_ranks_have_made_a_step_and_waits_from_the_moment_it_is_put_back() -> None:
    state = RunState()
    started = RunStarted(time=1.0, run="r", recipe="r", run_dir="/r", world_size=1)
    seen = []
    for event in (
        started,
        RankState(time=2.0, rank=0, state="spawned"),
        step(number=5, time=3.0),
        Finding(time=4.0, kind="requeued", severity="info", message="its time limit is near"),
        started,  # with the time of the first one
        RankState(time=6.0, rank=0, state="spawned"),
        step(number=6, time=7.0),
    ):
        state.apply(event)
        seen.append((state.status, state.queue.is_before_ranks, state.has_progressed))
    assert seen == [
        ("starting", False, False),
        ("starting", False, False),
        ("running", False, True),
        ("queued", True, False),
        ("running", True, False),
        ("running", False, False),
        ("running", False, True),
    ]


def test_the_status_is_how_the_run_ended() -> None:
    state = fold(step())
    assert state.status == "running"
    state.apply(RunEnded(time=9.0, status="stopped", exit_code=130))
    assert state.status == "stopped"


def test_the_transfer_time_of_a_bucket_is_that_of_the_last_rank_to_arrive() -> None:
    sampled = {"sync_bytes": 30_000_000, "sync_buckets": 2}
    state = fold(
        step(0, 10, sync_ms=40.0, bucket_ms=[30.0, 20.0], **sampled),
        step(1, 10, sync_ms=12.0, bucket_ms=[5.0, 15.0], **sampled),
    )
    assert wire_ms(state.ranks.values(), state.world_size) == [5.0, 15.0]
    # The span of the last rank, 12 ms, is shorter than 5 + 15 ms one after the other; two ranks: 2 (n - 1) / n = 1.
    assert state.bus_bytes_per_s == pytest.approx(30_000_000 / 0.012)


@pytest.mark.parametrize(
    "events",
    [
        [step(0, 10, bucket_ms=[1.0])],
        [step(0, 10, bucket_ms=[1.0]), step(1, 10, bucket_ms=[1.0, 2.0])],
        [step(0, 10), step(1, 10)],
    ],
    ids=["one rank has not told", "before and after the buckets were rebuilt", "nobody measured"],
)
def test_without_every_ranks_buckets_there_is_no_bandwidth(events: list[AnyEvent]) -> None:
    state = fold(*events)
    assert wire_ms(state.ranks.values(), state.world_size) == []
    assert state.bus_bytes_per_s is None


def test_a_history_is_kept_on_request_and_begins_anew_with_a_restart() -> None:
    memory = NodeSample(time=3.0, node=0, host="a", ranks=[RankSample(rank=0, rss_bytes=7)])
    plain, keeping = RunState(world_size=1), RunState(world_size=1, history=2)
    for state in (plain, keeping):
        state.apply_all([memory, *(step(0, number) for number in (4, 5, 6)), memory])
    assert not plain.ranks[0].steps
    assert not plain.ranks[0].rss_bytes
    assert [event.step for event in keeping.ranks[0].steps] == [5, 6]
    assert list(keeping.ranks[0].rss_bytes) == [(3.0, 7)]
    assert keeping.ranks[0].started_at == 3
    keeping.apply(RankState(time=9.0, rank=0, state="spawned"))
    assert not keeping.ranks[0].steps
    assert not keeping.ranks[0].rss_bytes


OOM = Failure(time=5.0, rank=1, kind="out_of_memory", message="CUDA out of memory")
OVER = RunEnded(time=9.0, status="failed", exit_code=1)


def failure(rank: int | None, kind: str, time: float = 6.0) -> Failure:
    return Failure(time=time, rank=rank, kind=kind, message="Connection closed by peer")


@pytest.mark.parametrize(
    ("events", "standings"),
    [
        ([OOM], ["training", "failed", "training"]),
        ([OOM, failure(0, "lost_peer")], ["lost peer", "failed", "training"]),
        ([failure(0, "lost_peer", 4.0), OOM], ["lost peer", "failed", "training"]),
        ([failure(0, "lost_peer", 4.0), failure(2, "lost_peer")], ["failed", "training", "lost peer"]),
        ([OOM, failure(0, "lost_peer"), OVER], ["lost peer", "failed", "stopped"]),
        ([OOM, failure(0, "signal"), failure(2, "exception")], ["stopped", "failed", "failed"]),
        ([OOM, RankState(time=7.0, rank=0, state="failed")], ["stopped", "failed", "training"]),
        ([RankState(time=4.0, rank=0, state="failed"), OOM], ["stopped", "failed", "training"]),
        ([failure(None, "launch"), RankState(time=7.0, rank=0, state="failed")], ["stopped", "training", "training"]),
        ([OVER, step(0, 8)], ["stopped", "stopped", "stopped"]),
        ([RunEnded(time=9.0, status="stopped", exit_code=130)], ["stopped", "stopped", "stopped"]),
        ([RunEnded(time=9.0, status="finished", exit_code=0)], ["training", "training", "training"]),
        (
            [OOM, failure(0, "lost_peer"), *(RankState(time=8.0, rank=r, state="spawned", pid=7) for r in (0, 1))],
            ["spawned", "spawned", "training"],
        ),
    ],
)
def test_only_ranks_that_failed_by_themselves_are_failed(events: list[AnyEvent], standings: list[str]) -> None:
    state = fold(*(step(rank) for rank in range(3)), *events, world_size=3)
    assert [view.display_state for view in state.ranks.values()] == standings
