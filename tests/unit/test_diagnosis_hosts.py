"""What hosts explain: too few cores, silence, processes that are stopped, and nodes all of whose ranks are late."""

from __future__ import annotations

import functools

import pytest
from test_diagnosis import SimulatedRun, Slow, balanced, late, summaries
from test_diagnosis_uneven import late_in_turns

from gputrain_tui.diagnosis.roll_up import newest_findings, roll_up
from gputrain_tui.state.finding_text import finding_summary
from trainer.contract.record import Finding, NodeSample, RankSample, RankState


def sampled(
    run: SimulatedRun,
    seconds: int,
    *,
    wait_percent: float,
    cpu_percent: float = 20.0,
    ranks: int = 2,
    cores: int | None = 1,
    busy_threads: float | None = 1.0,
    other_cpu_percent: float | None = None,
    children: int | None = None,
    node: int = 0,
    throttled_percent: tuple[float, ...] = (),
    quota_cores: float = 0.5,
    machine_cores: int | None = None,
    cpuset_cores: int | None = None,
    slow: Slow = balanced,
) -> list[Finding]:
    """Let as many seconds pass, each with a sample of a host whose ranks are all alike, but for their throttling."""
    found = []
    for _ in range(seconds):
        run.now += 1.0
        samples = [
            RankSample(
                rank=node * 2 + n, cpu_percent=cpu_percent, wait_percent=wait_percent, busy_threads=busy_threads,
                children=children, cpu_throttled_percent=throttled_percent[n] if throttled_percent else None,
                cpu_quota_cores=quota_cores if throttled_percent else None,
            )
            for n in range(ranks)
        ]  # fmt: skip
        run.state.apply(
            NodeSample(
                time=run.now, node=node, host=f"node{node}", cores=cores, ranks=samples,
                other_cpu_percent=other_cpu_percent, machine_cores=machine_cores, cpuset_cores=cpuset_cores,
            )
        )  # fmt: skip
        found += run.steps(1, slow)
    return found


CROWDED = [
    pytest.param({"ranks": 4, "cores": 2, "busy_threads": 1.0, "wait_percent": 85.0}, 1,
                 "start at most 2 ranks on this host, one per core (cpu_ranks = 2, threads = 1)", id="ranks"),
    pytest.param({"ranks": 2, "cores": 8, "busy_threads": 8.0, "wait_percent": 40.0}, 4,
                 "set threads = 4 (for a script OMP_NUM_THREADS=4): about 8 threads of each rank are busy",
                 id="threads"),
    pytest.param({"ranks": 2, "cores": 8, "busy_threads": None, "cpu_percent": 500.0, "wait_percent": 60.0}, 4,
                 "set threads = 4 (for a script OMP_NUM_THREADS=4): about 6 threads of each rank are busy",
                 id="threads that are not counted"),
    pytest.param({"ranks": 2, "cores": 4, "busy_threads": 1.0, "wait_percent": 40.0, "other_cpu_percent": 300.0}, 1,
                 "use fewer loader workers (num_workers) and stop other jobs on this host", id="other processes"),
]  # fmt: skip


@pytest.mark.parametrize(("sample", "threads", "advice"), CROWDED)
def test_more_busy_threads_than_cores_are_reported_with_the_threads_to_set(
    sample: dict[str, float], threads: int, advice: str
) -> None:
    run = SimulatedRun(4)
    run.steps(10)
    found = sampled(run, 12, **sample)  # type: ignore[arg-type]
    assert summaries(found) == [("cpu_contention", "raised", None, "core_wait")]
    assert found[0].host == "node0"
    assert f"wait {sample['wait_percent']:.0f} % of the time for a free core" in found[0].message
    assert found[0].severity == ("critical" if sample["wait_percent"] >= 50.0 else "warning")
    assert found[0].evidence.get("threads_to_set") == threads
    assert found[0].advice == advice
    assert sampled(run, 60, **sample) == [], "it stands for as long as it lasts"  # type: ignore[arg-type]
    assert summaries(sampled(run, 10, wait_percent=2.0)) == [("cpu_contention", "cleared", None, "core_wait")]


@pytest.mark.parametrize(
    ("sample", "severity", "advice"),
    [
        ({"busy_threads": 1.6}, "info", "nothing in the run's settings takes more cores than this host has"),
        ({"other_cpu_percent": 150.0, "children": 0}, "warning", "stop other jobs on this host"),
        ({"other_cpu_percent": 150.0, "children": 2}, "warning",
         "use fewer loader workers (num_workers) and stop other jobs on this host"),
    ],
    ids=["threads", "no loader workers", "loader workers"],
)  # fmt: skip
def test_no_advice_is_given_that_is_followed_already(sample: dict[str, float], severity: str, advice: str) -> None:
    run = SimulatedRun(2)
    for rank in (0, 1):
        run.state.apply(RankState(time=run.now, rank=rank, state="training", threads=1))
    run.steps(10)
    (found,) = sampled(run, 12, **{"ranks": 2, "cores": 2, "wait_percent": 40.0, **sample})  # type: ignore[arg-type]
    assert (found.kind, found.severity, found.advice) == ("cpu_contention", severity, advice)
    assert "threads_to_set" not in found.evidence


def test_fewer_loader_workers_are_no_advice_where_a_rank_had_none_when_they_were_counted() -> None:
    run = SimulatedRun(2)
    run.steps(10)
    crowded = functools.partial(sampled, run, wait_percent=40.0, other_cpu_percent=150.0, cores=2)
    assert crowded(9, children=0) == []
    found = crowded(3, children=None)
    assert [each.advice.rpartition("; ")[2] for each in found] == ["stop other jobs on this host"]


@pytest.mark.parametrize(
    "sample",
    [
        {"wait_percent": 8.0, "cores": 1},
        {"wait_percent": 40.0, "cores": 4},
        {"wait_percent": 80.0, "cores": None},
    ],
    ids=["short waits", "cores enough", "cores unknown"],
)
def test_cores_that_suffice_or_are_unknown_are_no_finding(sample: dict[str, float]) -> None:
    run = SimulatedRun(2)
    run.steps(10)
    assert sampled(run, 30, **sample) == []  # type: ignore[arg-type]


def test_a_burst_of_other_work_and_the_start_of_the_ranks_are_no_finding() -> None:
    run = SimulatedRun(2)
    for _ in range(20):
        run.now += 1.0
        ranks = [RankSample(rank=rank, wait_percent=90.0, busy_threads=1.0) for rank in (0, 1)]
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", cores=1, ranks=ranks))
        assert run.diagnose() == []
    for _ in range(4):
        assert sampled(run, 4, wait_percent=90.0) == []
        assert sampled(run, 8, wait_percent=2.0) == []


def test_each_crowded_host_has_its_own_finding() -> None:
    run = SimulatedRun(4)
    run.steps(10)
    found = []
    for _ in range(12):
        found += sampled(run, 1, node=0, wait_percent=1.0) + sampled(run, 1, node=1, wait_percent=80.0)
    assert [(finding.kind, finding.rank, finding.host) for finding in found] == [("cpu_contention", 2, "node1")]
    for _ in range(12):
        found += sampled(run, 1, node=0, wait_percent=80.0) + sampled(run, 1, node=1, wait_percent=80.0)
    assert [(finding.rank, finding.host) for finding in found[1:]] == [(0, "node0")]


# --- quotas and cpusets ----------------------------------------------------------------------------------------------

OTHERS_BUSY = {"wait_percent": 90.0, "busy_threads": 1.0, "other_cpu_percent": 300.0, "cores": 2}


@pytest.mark.parametrize(
    ("throttled", "quota", "message"),
    [
        ((62.0, 62.0), 0.5, "a cpu quota of 0.5 cores holds 2 ranks on node0 back 62 % of the time"),
        ((3.0, 62.0), 1.0, "a cpu quota of 1 core holds rank 1 on node0 back 62 % of the time"),
        ((0.0, 14.0), 0.5, "a cpu quota of 0.5 cores holds rank 1 on node0 back 14 % of the time"),
        ((0.0, 7.0), 0.5, ""),
    ],
)
def test_a_quota_that_holds_ranks_back_is_named_and_nothing_else_is_blamed(
    throttled: tuple[float, ...], quota: float, message: str
) -> None:
    run = SimulatedRun(2)
    run.steps(10)
    sample = {"throttled_percent": throttled, "quota_cores": quota, "wait_percent": throttled[1] + 10.0, "cores": 1}
    found = sampled(run, 12, **sample)  # type: ignore[arg-type]
    assert [each.message for each in found] == [message] * bool(message)
    if message:
        (first,) = found
        assert (first.kind, first.cause, first.host) == ("cpu_contention", "cpu_quota", "node0")
        assert finding_summary(first).endswith("too small a cpu quota")
        assert first.severity == ("critical" if throttled[1] >= 50.0 else "warning")
        assert first.advice.startswith("raise that quota (cpu.max or cpu.cfs_quota_us of the cgroup; docker --cpus, ")
        assert sampled(run, 60, **sample) == [], "it stands for as long as it lasts"  # type: ignore[arg-type]
        # Cleared when half of the threshold is left no more.
        assert sampled(run, 12, throttled_percent=(0.0, 6.0), wait_percent=10.0) == []
        assert summaries(sampled(run, 12, throttled_percent=(0.0, 4.0), wait_percent=10.0)) == [
            ("cpu_contention", "cleared", None, "cpu_quota")
        ]


def test_other_processes_are_blamed_beside_a_quota_only_for_what_it_does_not_explain() -> None:
    run = SimulatedRun(2)
    run.steps(10)
    (found,) = sampled(run, 12, **OTHERS_BUSY, throttled_percent=(5.5, 5.5))  # type: ignore[arg-type]
    assert (found.cause, "and other processes use" in found.message) == ("core_wait", True)
    (found,) = sampled(run, 20, **OTHERS_BUSY, throttled_percent=(70.0, 70.0))  # type: ignore[arg-type]
    assert (found.cause, found.state) == ("cpu_quota", "raised"), "it says so when that becomes the cause"
    assert sampled(run, 20, **OTHERS_BUSY, throttled_percent=(70.0, 70.0)) == []  # type: ignore[arg-type]
    (found,) = sampled(run, 20, **OTHERS_BUSY)  # type: ignore[arg-type]
    assert (found.cause, found.state) == ("core_wait", "raised"), "the quota was lifted, and others are busy still"


@pytest.mark.parametrize(("throttled", "kinds"), [(40.0, {"cpu_contention"}), (2.0, {"imbalance"})])
def test_ranks_that_a_quota_holds_back_in_turns_have_no_uneven_batches(throttled: float, kinds: set[str]) -> None:
    run = SimulatedRun(2)
    run.steps(10)
    found = sampled(run, 150, wait_percent=9.0, throttled_percent=(throttled, throttled), slow=late_in_turns)
    assert {each.kind for each in found} == kinds
    again = sampled(run, 90, wait_percent=9.0, throttled_percent=(0.0, 0.0), slow=late_in_turns)
    assert ("imbalance" in {each.kind for each in found + again if each.state == "raised"}) is True


@pytest.mark.parametrize(("ranks", "is_found"), [(8, True), (4, False)])
def test_where_ranks_wait_for_each_other_their_busy_threads_show_that_cores_are_few(ranks: int, is_found: bool) -> None:
    run = SimulatedRun(8)
    run.steps(10)
    found = sampled(run, 30, ranks=ranks, cores=2, wait_percent=10.0)
    assert [each.message.partition(": ")[0] for each in found] == is_found * [
        "the busy threads of the 8 ranks on node0 wait 75 % of the time for a free core"
    ]
    assert all(each.advice.startswith("start at most 2 ranks on this host") for each in found)
    run.state.apply(NodeSample(time=run.now, node=0, host="node0", cores=2, ranks=[]))
    assert run.steps(1) == [], "a host without ranks, at the end of the run, has not become faster"


@pytest.mark.parametrize(
    ("slow", "cores", "kinds"),
    [
        (late(1, backward=8.0), 2, {"cpu_contention"}),
        (late(1, backward=8.0), 8, {"straggler"}),
        (late(1, backward=90.0), 2, {"cpu_contention", "straggler"}),
        (late_in_turns, 2, {"cpu_contention"}),
        (late_in_turns, 8, {"imbalance"}),
        (late(1, backward=8.0), 1, {"cpu_contention"}),
    ],
    ids=["late", "late with enough cores", "most of each step", "in turns", "in turns with enough cores", "one core"],
)
def test_on_a_host_with_fewer_cores_than_ranks_one_is_late_only_if_that_is_most_of_each_step(
    slow: Slow, cores: int, kinds: set[str]
) -> None:
    run = SimulatedRun(4)
    run.steps(10)
    found = sampled(run, 150, ranks=4, cores=cores, wait_percent=40.0, slow=slow)
    assert {each.kind for each in found if each.state == "raised"} == kinds
    if cores < 4:
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", cores=cores, ranks=[]))
        assert run.steps(1, slow) == [], "ranks that are gone at the end do not show that they had enough cores"


@pytest.mark.parametrize("waits", [True, False], ids=["its waits were measured", "they were not"])
def test_a_rank_that_is_late_for_its_quota_is_named_with_it(waits: bool) -> None:
    run = SimulatedRun(2)
    slow = late(1, first=1, forward_wait=60.0) if waits else late(1, first=1, forward=80.0)
    found = sampled(run, 150, wait_percent=50.0, throttled_percent=(0.0, 60.0), slow=slow)
    assert {(each.kind, each.rank, each.cause) for each in found} == {
        ("cpu_contention", None, "cpu_quota"),
        ("straggler", 1, "cpu_quota"),
    }
    assert any(each.message.endswith("because of the cpu quota of its cgroup") for each in found)


@pytest.mark.parametrize(
    ("cpuset_cores", "cause", "whose", "advice"),
    [
        (2, "cpuset", "the cpuset of its cgroup", "give it more cores (cpuset.cpus of the cgroup; docker"),
        (64, "cpu_affinity", "its CPU affinity", "give it more cores (taskset, numactl, srun --cpu-bind)"),
    ],
)
def test_cores_of_the_machine_that_the_ranks_may_not_use_are_named(
    cpuset_cores: int, cause: str, whose: str, advice: str
) -> None:
    run = SimulatedRun(2)
    run.steps(10)
    (found,) = sampled(
        run, 12, ranks=2, cores=2, busy_threads=4.0, wait_percent=60.0, machine_cores=64, cpuset_cores=cpuset_cores
    )
    assert (found.kind, found.cause) == ("cpu_contention", cause)
    assert found.message.endswith(f"8.0 threads are busy on 2 cores of 64, all that {whose} allows")
    assert advice in found.advice


# --- silent hosts and stopped processes ------------------------------------------------------------------------------


def silent(run: SimulatedRun, state: str) -> None:
    run.state.apply(Finding(time=run.now, kind="host_silent", state=state, rank=2, host="node1"))  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [True, False], ids=["looked at meanwhile", "looked at afterwards"])
def test_ranks_of_a_host_that_was_silent_are_neither_busy_nor_stalled(known: bool) -> None:
    """What they did in its silence comes later than the word that it is heard of again."""
    run = SimulatedRun(4)
    run.steps(40)
    run.state.apply(NodeSample(time=run.now, node=1, host="node1", ranks=[RankSample(rank=3, cpu_percent=99.0)]))
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank < 2])
    run.diagnose()
    run.now += 5.0
    silent(run, "raised")
    for _ in range(30):
        run.now += 1.0
        assert not known or run.diagnose() == []
    silent(run, "cleared")
    assert run.diagnose(1.0) == []
    assert run.diagnose(5.0) == []
    found = run.diagnose(10.0)
    assert {(finding.kind, finding.rank) for finding in found} == {("stalled", 2), ("stalled", 3)}, (
        "they are stalled now"
    )


def stop(run: SimulatedRun, rank: int, held: str | None = "T") -> None:
    run.state.ranks[rank].pid = 4711
    sample = RankSample(rank=rank, cpu_percent=0.0, held=held, sleeps_in="do_signal_stop")
    run.state.apply(NodeSample(time=run.now, node=rank // 2, host=f"node{rank // 2}", ranks=[sample]))


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_stopped_process_is_reported_soon_with_the_command_that_continues_it(all_ranks: bool) -> None:
    run = SimulatedRun(4)
    run.steps(40)
    run.diagnose()
    for rank in range(4) if all_ranks else [2]:
        stop(run, rank)
    assert run.diagnose(2.0) == []
    found = run.diagnose(2.0)
    assert [(finding.rank, finding.cause) for finding in found] == [
        (rank, "stopped") for rank in (range(4) if all_ranks else [2])
    ]
    last = found[-1] if all_ranks else found[0]
    assert last.message.endswith("; its process is stopped (state T)")
    assert f"`kill -CONT 4711` on {last.host} continues it" in last.advice
    assert {finding.state for finding in run.steps(1)} == {"cleared"}


def test_a_process_held_by_a_debugger_is_reported_as_such() -> None:
    run = SimulatedRun(4)
    run.steps(40)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank != 2])
    stop(run, 2, held="t")
    run.diagnose()
    (found,) = run.diagnose(12.0)
    assert found.message.endswith("; the process of rank 2 is held by a debugger")


# --- stragglers of one node ------------------------------------------------------------------------------------------


def test_stragglers_of_one_node_are_shown_as_one_and_recorded_one_by_one() -> None:
    run = SimulatedRun(6, noise=0.01)
    run.steps(60)
    found = run.steps(20, lambda step, rank: {"data": 30.0 + rank} if rank >= 4 else {})
    assert sorted((finding.rank, finding.cause) for finding in found) == [(4, "data"), (5, "data")]
    ((shown, stands),) = newest_findings(run.state)
    assert stands
    assert (shown.rank, shown.host, shown.evidence["ranks"]) == (5, "node2", 2)
    assert shown.message.startswith("2 ranks of node2 take 33.")
    assert shown.message.endswith("of a step), because of their data loading")
    over = run.steps(40)
    assert [finding.message for finding in roll_up(over, run.state.ranks)] == [
        "2 ranks of node2 take longer than the others in each step, because of their data loading"
    ]
    assert [stands for _, stands in newest_findings(run.state)] == [False]


@pytest.mark.parametrize(
    ("ranks", "late_ranks", "causes"),
    [(2, [0, 1], ["data", "data"]), (4, [1, 2], ["data", "data"]), (4, [2, 3], ["data", "forward"])],
    ids=["one node", "of two nodes", "two causes"],
)
def test_stragglers_that_their_node_does_not_explain_stay_apart(
    ranks: int, late_ranks: list[int], causes: list[str]
) -> None:
    run = SimulatedRun(ranks)
    found = [
        Finding(time=1.0, kind="straggler", rank=rank, cause=cause)
        for rank, cause in zip(late_ranks, causes, strict=True)
    ]
    assert roll_up(found, run.state.ranks) == found
