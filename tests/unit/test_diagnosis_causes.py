from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from test_diagnosis import SimulatedRun, Slow, busy_machine, late, summaries
from test_diagnosis_hosts import sampled
from test_diagnosis_uneven import late_in_turns

from gputrain_tui.cli import COMMANDS
from gputrain_tui.console.actions import ACTIONS
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.diagnosis.gpu_throttling import throttled_by
from gputrain_tui.state.finding_text import finding_summary
from trainer.contract.record import Checkpoint, Finding, GpuSample, NodeSample, RankState, TrainingPlan, Validation

SLOW_DEVICE: Slow = lambda step, rank: {"forward": 12.0, "backward": 24.0} if rank == 3 and step > 60 else {}  # noqa: E731
"""A device of half the speed."""


def sample_gpus(run: SimulatedRun, clocks: list[int], reasons: Mapping[int, list[str]], celsius: float = 60.0) -> None:
    """Sample every GPU's clock and throttle reasons."""
    for node in sorted({rank // 2 for rank in range(len(clocks))}):
        gpus = [
            GpuSample(
                index=rank % 2,
                uuid=f"GPU-{rank}",
                rank=rank,
                sm_clock_mhz=clocks[rank],
                max_sm_clock_mhz=1980,
                temperature_celsius=celsius if rank in reasons else 60.0,
                power_watts=400.0,
                throttle_reasons=reasons.get(rank, []),
            )
            for rank in range(2 * node, min(2 * node + 2, len(clocks)))
        ]
        run.state.apply(NodeSample(time=run.now, node=node, host=f"node{node}", gpus=gpus))


@pytest.mark.parametrize(
    ("clock", "reasons", "celsius", "cause", "because"),
    [
        (960, ["thermal_software"], 88.0, "gpu_thermal", "(960 MHz at 88 °C, the others 1980 MHz)"),
        (960, ["power_cap", "thermal_hardware"], 91.0, "gpu_thermal", "throttling of its GPU (960 MHz at 91 °C"),
        (
            960,
            ["power_cap"],
            60.0,
            "gpu_clock",
            "lower clock (960 MHz, the others 1980 MHz), held down by its power cap",
        ),
        (960, ["hardware_slowdown", "power_brake"], 60.0, "gpu_clock", "(heat or power) and the machine's power brake"),
        (960, [], 60.0, "gpu_clock", "lower clock (960 MHz, the others 1980 MHz)"),
        (1980, ["thermal_software"], 88.0, "unattributed", "forward +12.0 ms, backward +24.0 ms"),
        (1900, ["thermal_software"], 88.0, "unattributed", "forward +12.0 ms, backward +24.0 ms"),
    ],
    ids=["heat", "heat and power", "power cap", "two reasons", "no reason", "full clock", "a little lower"],
)
def test_a_gpu_whose_clock_explains_the_lateness_is_named_with_its_throttle_reason(
    clock: int, reasons: list[str], celsius: float, cause: str, because: str
) -> None:
    run = SimulatedRun(noise=0.0, device="cuda:1 NVIDIA H200")
    sample_gpus(run, [1980, 1980, 1980, clock], {3: reasons}, celsius)
    run.steps(60)
    found = run.steps(20, SLOW_DEVICE)
    assert summaries(found) == [("straggler", "raised", 3, cause)]
    finding = found[0]
    assert because in finding.message
    assert (finding.host, finding.device) == ("node1", "cuda:1 NVIDIA H200")
    if cause != "unattributed":
        assert finding.evidence["sm_clock_mhz"] == clock
        assert finding.evidence["usual_sm_clock_mhz"] == 1980
        assert finding.evidence["temperature_celsius"] == celsius
        assert finding.evidence["power_watts"] == 400.0


def test_throttling_that_ends_clears_the_finding_and_comes_again_with_its_cause() -> None:
    run = SimulatedRun(noise=0.0, device="cuda:1")
    sample_gpus(run, [1980, 1980, 1980, 960], {3: ["thermal_software"]}, 88.0)
    run.steps(60)
    assert summaries(run.steps(40, SLOW_DEVICE)) == [("straggler", "raised", 3, "gpu_thermal")]
    sample_gpus(run, [1980] * 4, {})
    assert summaries(run.steps(40)) == [("straggler", "cleared", 3, "gpu_thermal")]
    sample_gpus(run, [1980, 1980, 1980, 960], {3: ["power_cap"]})
    assert summaries(run.steps(40, SLOW_DEVICE)) == [("straggler", "raised", 3, "gpu_clock")]


def test_gpus_throttled_alike_are_no_stragglers() -> None:
    run = SimulatedRun(device="cuda:0")
    sample_gpus(run, [960] * 4, {rank: ["power_cap"] for rank in range(4)})
    assert run.steps(200) == []


@pytest.mark.parametrize(
    ("clock", "reasons", "words"),
    [
        (960, ["thermal_software", "power_cap"], "heat"),
        (1700, ["thermal_hardware", "hardware_slowdown"], "heat"),
        (960, ["power_brake"], "the machine's power brake"),
        (960, ["power_cap"], "its power cap"),
        (1500, ["power_cap"], ""),
        (1900, ["thermal_software"], ""),
        (960, ["application_clocks"], ""),
        (960, [], ""),
        (None, ["thermal_software"], ""),
    ],
)
def test_a_gpu_is_throttled_by_its_reason_and_its_clock(clock: int | None, reasons: list[str], words: str) -> None:
    gpu = GpuSample(index=0, uuid="a", sm_clock_mhz=clock, max_sm_clock_mhz=1980, throttle_reasons=reasons)
    assert throttled_by(gpu) == words


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        ([3], "GPU 1 on node1 (rank 3) is throttled by heat: 960 of 1,980 MHz at 88 °C"),
        ([2, 3], "2 GPUs on node1 are throttled by heat: 960 of 1,980 MHz at 88 °C on the slowest"),
    ],
)
def test_throttled_gpus_of_a_host_are_one_finding_that_names_the_reason(hot: list[int], message: str) -> None:
    run = SimulatedRun(device="cuda:0")

    def seconds(count: int, *, throttled: bool) -> list[Finding]:
        found = []
        for _ in range(count):
            clocks = [960 if throttled and rank in hot else 1980 for rank in range(4)]
            sample_gpus(run, clocks, {rank: ["thermal_software"] for rank in hot if throttled}, 88.0)
            found += run.steps(1)
        return found

    for _ in range(4):  # now and then
        assert seconds(4, throttled=True) == []
        assert seconds(8, throttled=False) == []
    assert seconds(4, throttled=True) == []
    (found,) = seconds(2, throttled=True)
    assert (found.kind, found.rank, found.host, found.ranks) == ("gpu_throttled", 2, "node1", hot)
    assert (found.cause, found.message, found.advice) == ("gpu_thermal", message, ADVICE["gpu_thermal"])
    assert seconds(30, throttled=True) == []
    assert summaries(seconds(9, throttled=False)) == [("gpu_throttled", "cleared", 2, "gpu_thermal")]


CAUSES: list[tuple[dict[str, float], str, str]] = [
    ({"data": 30.0}, "data", "because of its data loading"),
    ({"h2d": 30.0}, "h2d", "because of copying batches to its device"),
    ({"forward": 30.0}, "forward", "because of its forward pass"),
    ({"backward": 30.0}, "backward", "because of its backward pass"),
    ({"optimizer": 30.0}, "optimizer", "because of its optimizer step"),
    ({"backward": 30.0, "gc": 29.0}, "garbage_collection", "because of Python's garbage collection"),
]


@pytest.mark.parametrize(("extra", "cause", "because"), CAUSES, ids=[cause for _, cause, _ in CAUSES])
def test_a_finding_has_rank_lateness_cause_and_advice(extra: dict[str, float], cause: str, because: str) -> None:
    run = SimulatedRun(noise=0.0, device="cuda:1 NVIDIA H200")
    run.steps(60)
    found = run.steps(40, late(3, **extra))
    assert summaries(found) == [("straggler", "raised", 3, cause)]
    finding = found[0]
    assert finding.message.startswith(
        "rank 3 takes 30.0 ms longer than the others in each step (41 % of a step), " + because
    )
    assert (finding.rank, finding.host, finding.device) == (3, "node1", "cuda:1 NVIDIA H200")
    assert finding.evidence["excess_ms"] == pytest.approx(30.0)
    assert len(finding.advice) > 40
    assert summaries(run.steps(40)) == [("straggler", "cleared", 3, cause)]


def units(finding: Finding) -> list[str]:
    """Return the names of the evidence that have no unit."""
    known = ("_ms", "_s", "_bytes", "_share", "_percent", "_mhz", "_celsius", "_watts", "_per_s", "_per_hour")
    counts = (
        "loss",
        "usual_loss",
        "loss_noise",
        "followers",
        "steps",
        "first_step",
        "last_step",
        "ranks",
        "cores",
        "busy_threads",
        "threads_to_set",
    )
    counts += tuple(f"{end}_{what}" for end in ("least", "most") for what in ("samples", "tokens"))
    return [name for name in finding.evidence if not name.endswith(known) and name not in counts]


def test_every_number_of_the_evidence_has_a_unit() -> None:
    run = SimulatedRun(device="cuda:0")
    sample_gpus(run, [1980, 1980, 1980, 700], {3: ["thermal_software"]})
    found = run.steps(100, SLOW_DEVICE)
    found += SimulatedRun(wire_ms=60.0).steps(100)
    found += SimulatedRun().steps(100, lambda _step, _rank: {"data": 60.0})
    found += SimulatedRun().steps(150, late(2, first=1, forward_wait=10.0, backward_wait=12.0))
    stopped = SimulatedRun(2)
    stopped.steps(40)
    stopped.diagnose()
    found += stopped.diagnose(60.0)
    found += SimulatedRun(2).steps(80, late_in_turns)
    crowded = SimulatedRun(2)
    crowded.steps(10)
    found += sampled(crowded, 12, wait_percent=80.0)
    kinds = {"straggler", "imbalance", "communication_bound", "cpu_contention", "input_bound", "stalled"}
    assert {finding.kind for finding in found} == kinds
    assert [units(finding) for finding in found] == [[]] * len(found)


# --- no finding ---------------------------------------------------------------------------------------------------


def test_slow_first_steps_are_no_finding() -> None:
    first: Slow = lambda step, rank: {"forward": 900.0 / step} if step <= 5 and rank == 1 else {}  # noqa: E731
    assert SimulatedRun().steps(100, first) == []


@pytest.mark.parametrize("every", [10, 25])
def test_pauses_for_validation_and_checkpoints_are_no_finding(every: int) -> None:
    """The pause itself is in no step; caches that it has emptied make the first step after it longer on one rank."""
    run = SimulatedRun()
    run.state.apply(TrainingPlan(time=0.0, world_size=4, updates_per_epoch=100, samples_per_epoch=800))
    for n in range(400 // every):
        cold = run.step + 1
        slow: Slow = lambda step, rank, cold=cold: {"forward": 200.0} if (step, rank) == (cold, 0) else {}  # type: ignore[misc] # noqa: E731
        assert run.steps(every, slow) == []
        pause = "validating" if n % 2 else "saving"
        for rank in range(4):
            run.state.apply(RankState(time=run.now, rank=rank, state=pause))  # type: ignore[arg-type]
        assert run.diagnose(300.0) == []
        run.state.apply(
            Validation(time=run.now, step=run.step, epoch=1, split="valid", loss=2.0)
            if n % 2
            else Checkpoint(time=run.now, step=run.step, path="c", bytes=1, write_ms=1.0)
        )


def test_uneven_batches_at_the_end_of_epochs_are_no_finding() -> None:
    short: Slow = lambda step, rank: {"forward": -6.0, "backward": -12.0} if step % 30 == 0 and rank != 2 else {}  # noqa: E731
    assert SimulatedRun().steps(400, short) == []


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_hiccups_now_and_then_are_no_finding(part: str) -> None:
    hiccup: Slow = lambda step, rank: {part: 400.0} if step % 17 == 0 and rank == step // 17 % 4 else {}  # noqa: E731
    assert SimulatedRun().steps(500, hiccup) == []


def test_a_second_in_which_one_rank_is_held_up_is_no_finding() -> None:
    """Nine steps of 70 ms are fewer than three quarters of a window."""
    run = SimulatedRun()
    assert run.steps(300, lambda step, rank: {"backward": 30.0} if 101 <= step < 107 and rank == 1 else {}) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_machine_whose_ranks_share_cores_is_no_finding(ranks: int) -> None:
    run = SimulatedRun(ranks, noise=0.2, seed=9)
    assert run.steps(600, busy_machine(9, bursts=True), every=3) == []


# --- what was not measured ------------------------------------------------------------------------------------------


def unmeasured(run: SimulatedRun, count: int, slow: Slow, *, backward: bool = False, every: int = 1) -> list[Finding]:
    """Do steps of which every ``every``-th has no synchronisation time, nor perhaps a backward time."""
    found = []
    for _ in range(count):
        run.step += 1
        for event in run.one_step(slow, 2.0):
            if run.step % every == 0:
                event.sync_exposed_ms = event.sync_ms = event.sync_bytes = event.sync_buckets = None
                event.backward_ms = None if backward else event.backward_ms
            run.state.apply(event)
        found += run.diagnose()
    return found


@pytest.mark.parametrize("backward", [False, True], ids=["no sync", "neither sync nor backward"])
def test_no_straggler_is_raised_where_the_synchronisation_is_not_measured(backward: bool) -> None:
    """What a rank waited is in the rest of its step then: the fast ones would look slow."""
    run = SimulatedRun(3)
    assert unmeasured(run, 200, late(1, first=1, forward=40.0), backward=backward) == []
    run = SimulatedRun(3, wire_ms=60.0)
    assert unmeasured(run, 200, late(1, first=1), backward=backward) == []


@pytest.mark.parametrize("every", [2, 3])
def test_steps_whose_synchronisation_was_not_measured_do_not_blame_those_that_waited(every: int) -> None:
    run = SimulatedRun(3)
    assert unmeasured(run, 90, late(1, first=10**6), every=every) == []
    found = unmeasured(run, 60, late(1, forward=40.0), every=every)
    assert summaries(found) == [("straggler", "raised", 1, "forward")]
    assert found[0].evidence["excess_ms"] == pytest.approx(40.0, rel=0.1)


@pytest.mark.parametrize("backward", [False, True], ids=["no sync", "neither sync nor backward"])
def test_waiting_for_data_is_found_without_synchronisation_times(backward: bool) -> None:
    run = SimulatedRun(3)
    found = unmeasured(run, 100, lambda _step, _rank: {"data": 60.0}, backward=backward)
    assert summaries(found) == [("input_bound", "raised", None, "data")]


def test_a_straggler_is_cleared_when_the_synchronisation_is_no_longer_measured() -> None:
    run = SimulatedRun(3)
    assert summaries(run.steps(80, late(1, forward=40.0))) == [("straggler", "raised", 1, "forward")]
    assert summaries(unmeasured(run, 20, late(1, forward=40.0))) == [("straggler", "cleared", 1, "forward")]


@pytest.mark.parametrize(("device", "estimated"), [("cpu", True), ("cuda:0", False)])
def test_a_transfer_time_that_may_contain_core_waits_is_marked_as_not_measured(device: str, estimated: bool) -> None:
    """Without the comm hook (``sync_detail_every = 0``) ranks on CPU do not record their waits for a core."""
    run = SimulatedRun(wire_ms=60.0, device=device)
    found = []
    for _ in range(80):
        run.step += 1
        for event in run.one_step(late(0, first=10**6), 2.0):
            event.core_wait_ms = None
            run.state.apply(event)
        found += run.diagnose()
    assert summaries(found) == [("communication_bound", "raised", None, "communication")]
    assert ("waits for a core were not measured" in found[0].message) == estimated
    assert "not measured" not in SimulatedRun(wire_ms=60.0).steps(80)[0].message


def test_who_waits_in_an_earlier_synchronisation_of_the_step_is_not_blamed() -> None:
    """A wait that was not measured as one is part of the backward pass of those that wait."""
    earlier: Slow = lambda step, rank: {"data": 30.0} if rank == 1 else {"backward": 30.0}  # noqa: E731
    run = SimulatedRun(3)
    run.steps(60)
    assert run.steps(100, earlier) == []


@pytest.mark.parametrize("loads", [True, False], ids=["data from a DataLoader", "data from elsewhere"])
@pytest.mark.parametrize("task", [True, False])
def test_a_rank_that_is_late_outside_of_the_phases_is_late_in_its_scripts_own_code(loads: bool, task: bool) -> None:
    run, found = SimulatedRun(3, device="cuda:0"), []
    if task:
        run.state.apply(TrainingPlan(time=0.0, world_size=3, updates_per_epoch=100, samples_per_epoch=800))
    for _ in range(80):
        run.step += 1
        for event in run.one_step(late(1, first=10, data=40.0), 2.0):
            if event.rank == 1 and run.step >= 10 and event.data_ms is not None:
                event.data_ms -= 40.0
            event.data_ms = event.data_ms if loads else None
            run.state.apply(event)
        found += run.diagnose()
    assert summaries(found) == [("straggler", "raised", 1, "unattributed" if task else "other")]
    if not task:
        assert "the script's own code outside of forward, backward and optimizer" in found[0].message
        assert ("without a DataLoader" in found[0].message) != loads
        assert finding_summary(found[0]).endswith("ms: its own code")


@pytest.mark.parametrize("about", sorted(ADVICE))
def test_advice_names_only_commands_and_keys_that_there_are(about: str) -> None:
    for name in re.findall(r"gputrain (\w+)", ADVICE[about]):
        assert name in COMMANDS
    for key in re.findall(r"\b(\w) on (?:the|a) rank's page", ADVICE[about]):
        assert "`gputrain stacks`" in ADVICE[about], "what to type where there is no console"
        assert any(action.name == "stack" and key in action.keys for action in ACTIONS)
