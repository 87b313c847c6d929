from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.diagnosis.statistics import excess, jitter, lower_quartile, midmean, spread
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import run_mark
from gputrain_tui.state.standstill import RECORD_LAG_S
from trainer.contract.record import (
    Checksum,
    Doing,
    Failure,
    Finding,
    GpuSample,
    Joining,
    NodeSample,
    RankSample,
    RankState,
    Step,
    decode_events,
    encode_event,
)
from trainer.telemetry.step_events import merge

PARTS = {"data": 1.0, "h2d": 0.5, "forward": 12.0, "backward": 24.0, "optimizer": 2.5}
"""A balanced step of a rank, ms."""

Slow = Callable[[int, int], Mapping[str, float]]
"""Step and rank to what is longer than usual, ms; or the ``samples`` and ``tokens`` of its batch."""


def balanced(_step: int, _rank: int) -> Mapping[str, float]:
    return {}


class SimulatedRun:
    """A run whose ranks synchronise: who is late makes the others wait in the same step's synchronisation."""

    def __init__(
        self,
        ranks: int = 4,
        *,
        wire_ms: float = 3.0,
        noise: float = 0.02,
        seed: int = 1,
        broadcast: Mapping[int, Sequence[int]] | None = None,
        device: str = "cpu",
    ) -> None:
        """Begin.

        Args:
            ranks: how many.
            wire_ms: bare transfer of the gradients.
            noise: of each part, as a share of it.
            seed: of the noise.
            broadcast: per rank, for whom it waits at the start of its forward pass; None: no rank does.
            device: of every rank.
        """
        self.state = RunState(world_size=ranks, history=HISTORY)
        self.diagnosis = Diagnosis()
        self.now = 1000.0
        self.step = 0
        self.wire_ms = wire_ms
        self.noise = noise
        self.broadcast = broadcast or {}
        self.random = random.Random(seed)
        self.tails = dict.fromkeys(range(ranks), 0.0)
        """Optimizer times of the last step: they come before this step's synchronisation."""
        for rank in range(ranks):
            self.state.apply(
                RankState(
                    time=self.now, rank=rank, state="training", node=rank // 2, host=f"node{rank // 2}", device=device
                )
            )

    def steps(self, count: int, slow: Slow = balanced, *, loss: float | None = 2.0, every: int = 3) -> list[Finding]:
        """Do so many steps and diagnose after each ``every``-th and the last; return what was found."""
        found = []
        for left in reversed(range(count)):
            self.step += 1
            events = self.one_step(slow, loss)
            self.state.apply_all(events)
            if self.step % every == 0 or not left:
                found += self.diagnose()
        return found

    def diagnose(self, after_s: float = 0.0) -> list[Finding]:
        self.now += after_s
        found = self.diagnosis.update(self.state, self.now)
        self.state.apply_all(found)
        return found

    def one_step(self, slow: Slow, loss: float | None) -> list[Step]:
        events = []
        begins, own = {}, {}
        for rank in self.tails:
            extra = slow(self.step, rank)
            times = {p: ms * self._jitter() + extra.get(p, 0.0) for p, ms in PARTS.items()}
            waits = {p: extra[f"{p}_wait"] for p in (*PARTS, "sync") if f"{p}_wait" in extra}
            times = {part: ms + waits.get(part, 0.0) for part, ms in times.items()}
            begins[rank] = self.tails[rank] + times["data"] + times["h2d"]
            events.append((rank, times, waits, extra))
        for rank, times, _, _ in events:
            awaited = [begins[other] for other in self.broadcast.get(rank, ())]
            times["forward"] += max(0.0, max(awaited, default=0.0) - begins[rank])
            own[rank] = self.tails[rank] + sum(ms for part, ms in times.items() if part != "optimizer")
            self.tails[rank] = times["optimizer"]
        last = max(own.values())
        wire = self.wire_ms * self._jitter()
        self.now += (last + wire) / 1e3
        return [
            Step(
                time=self.now,
                rank=rank,
                step=self.step,
                epoch=1,
                steps=1,
                samples=int(extra.get("samples", 8)),
                tokens=int(extra["tokens"]) if "tokens" in extra else None,
                loss=loss,
                non_finite=["loss"] if loss is not None and not math.isfinite(loss) else [],
                grad_norm=1.0 if loss is not None and math.isfinite(loss) else None,
                step_ms=sum(times.values()) + last - own[rank] + wire,
                gc_ms=extra.get("gc", 0.0),
                core_wait_ms=waits,
                sync_ms=last - own[rank] + wire,
                sync_exposed_ms=last - own[rank] + wire,
                sync_bytes=4_000_000,
                sync_buckets=1,
                **{f"{part}_ms": ms for part, ms in times.items()},
            )
            for rank, times, waits, extra in events
        ]

    def _jitter(self) -> float:
        return 1.0 + self.noise * abs(self.random.gauss(0.0, 1.0))


def late(rank: int, first: int = 61, last: int = 10**9, **extra: float) -> Slow:
    return lambda step, who: extra if who == rank and first <= step < last else {}


def summaries(found: list[Finding]) -> list[tuple[str, str, int | None, str | None]]:
    return [(finding.kind, finding.state, finding.rank, finding.cause) for finding in found]


# --- stragglers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("part", ["data", "h2d", "forward", "backward", "optimizer"])
def test_a_delay_in_one_part_names_rank_and_part_within_twenty_steps(ranks: int, part: str) -> None:
    run = SimulatedRun(ranks)
    assert run.steps(60) == []
    found = run.steps(20, late(1, **{part: 30.0}))
    assert summaries(found) == [("straggler", "raised", 1, part)]
    finding = found[0]
    assert (finding.host, finding.device, finding.severity) == ("node0", "cpu", "critical")
    assert finding.evidence["excess_ms"] == pytest.approx(30.0, rel=0.1)
    assert finding.evidence[f"{part}_excess_ms"] == pytest.approx(30.0, rel=0.1)
    assert finding.evidence["late_ms"] == pytest.approx(30.0, rel=0.1)
    assert finding.advice
    assert finding.step is not None
    assert finding.step <= 80


@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        ({"forward": 30.0, "gc": 28.0}, "garbage_collection"),
        ({"forward": 15.0, "backward": 15.0}, "unattributed"),
        ({"forward": 25.0, "backward": 5.0}, "forward"),
        ({"forward": 22.0, "backward": 8.0}, "unattributed"),
    ],
    ids=["within the forward pass", "two parts alike", "more than four fifths", "less than four fifths"],
)
def test_a_cause_is_named_only_when_it_covers_four_fifths(extra: dict[str, float], cause: str) -> None:
    run = SimulatedRun(device="cuda:0")
    run.steps(60)
    assert summaries(run.steps(20, late(2, **extra))) == [("straggler", "raised", 2, cause)]


def test_a_rank_slower_in_every_phase_is_not_attributed_to_its_longest_phase() -> None:
    """The backward pass has more than four fifths of the lateness, as it has of the work."""
    usual = {**PARTS, "backward": 84.0}
    slower = {part: 0.5 * ms for part, ms in usual.items()}
    assert slower["backward"] > 0.8 * sum(slower.values())

    def found_with(extra: Mapping[str, float]) -> list[Finding]:
        """Make one rank of four slower by this after 60 steps."""
        slow = late(2, **extra)

        def longer(step: int, rank: int) -> Mapping[str, float]:
            more = slow(step, rank)
            return {**more, "backward": usual["backward"] - PARTS["backward"] + more.get("backward", 0.0)}

        return SimulatedRun(device="cuda:0").steps(100, longer)

    [found] = found_with(slower)
    assert summaries([found]) == [("straggler", "raised", 2, "unattributed")]
    assert "because all of its phases take longer, most of all its backward pass (+4" in found.message
    assert summaries(found_with({"backward": slower["backward"]})) == [("straggler", "raised", 2, "backward")]


def test_a_cause_is_weighed_against_the_lateness_of_the_same_steps() -> None:
    """A quarter of the steps are hardly late; seven tenths of the others' lateness are no four fifths of it."""
    pattern = (2.0, 2.0, 2.0, 20.0, 20.0, 20.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0)
    run = SimulatedRun(2, noise=0.0, device="cuda:0")
    run.steps(60)

    def uneven(step: int, rank: int) -> Mapping[str, float]:
        late_ms = pattern[step % len(pattern)] if rank == 1 else 0.0
        return {"backward": 0.7 * late_ms, "forward": 0.3 * late_ms}

    assert summaries(run.steps(60, uneven)) == [("straggler", "raised", 1, "unattributed")]


def test_a_core_slower_for_some_seconds_makes_no_straggler_and_one_that_stays_so_does() -> None:
    """As other guests of a host make it: each part longer, a few seconds at a time."""
    all_longer = {"forward": 12.0, "backward": 14.0, "optimizer": 4.0}
    run = SimulatedRun(2)
    assert run.steps(60) == []
    for _ in range(3):
        began = run.now
        assert run.steps(44, late(1, first=run.step + 1, **all_longer)) == []
        assert run.now - began > 3.0
        assert run.steps(60) == []
    began = run.now
    found = run.steps(90, late(1, first=run.step + 1, **all_longer))
    assert summaries(found) == [("straggler", "raised", 1, "unattributed")]
    assert 4.0 < found[0].time - began < 7.0


def test_a_rank_that_is_slow_from_the_first_step_is_found() -> None:
    assert summaries(SimulatedRun().steps(60, late(3, first=1, backward=10.0))) == [
        ("straggler", "raised", 3, "backward")
    ]


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_a_rank_on_which_the_others_mostly_wait_is_found_within_the_first_twenty_steps(part: str) -> None:
    run = SimulatedRun(2)
    assert summaries(run.steps(20, late(1, first=1, **{part: 60.0}))) == [("straggler", "raised", 1, part)]
    assert SimulatedRun(2).steps(20, late(1, first=1, **{part: 10.0})) == []


def test_a_finding_is_cleared_once_and_raised_again() -> None:
    run = SimulatedRun()
    slow = late(1, first=61, last=101, forward=30.0)
    assert summaries(run.steps(100, slow)) == [("straggler", "raised", 1, "forward")]
    assert summaries(run.steps(40, slow)) == [("straggler", "cleared", 1, "forward")]
    assert run.state.findings == {}
    assert summaries(run.steps(20, late(1, data=30.0))) == [("straggler", "raised", 1, "data")]


def test_a_straggler_that_becomes_much_slower_is_raised_anew_with_its_new_lateness() -> None:
    run = SimulatedRun()
    assert summaries(run.steps(100, late(1, forward=20.0))) == [("straggler", "raised", 1, "forward")]
    found = run.steps(100, late(1, forward=60.0))
    assert {summary[:3] for summary in summaries(found)} == {("straggler", "raised", 1)}
    assert found[-1].evidence["excess_ms"] == pytest.approx(60, rel=0.35)
    assert run.steps(100, late(1, forward=60.0)) == []
    assert len(run.state.findings) == 1


def test_faults_that_are_over_are_not_taken_for_the_noise_of_the_machine() -> None:
    run = SimulatedRun(2)
    assert run.steps(60) == []
    for turn, part in enumerate(["forward", "backward", "data", "optimizer"] * 3):
        rank = turn % 2
        found = run.steps(20, lambda _, who: {part: 30.0} if who == rank else {})  # noqa: B023 - called at once
        assert summaries(found) == [("straggler", "raised", rank, part)]
        found = run.steps(15, lambda _, who: {part: 30.0} if who == rank else {}) + run.steps(25)  # noqa: B023
        assert summaries(found) == [("straggler", "cleared", rank, part)]


def test_a_finding_stands_while_more_than_half_of_the_threshold_is_left() -> None:
    run = SimulatedRun(noise=0.0)
    assert summaries(run.steps(120, late(1, forward=6.0))) == [("straggler", "raised", 1, "forward")]
    assert run.steps(60, late(1, forward=3.5)) == []
    assert summaries(run.steps(40, late(1, forward=1.5))) == [("straggler", "cleared", 1, "forward")]


def test_a_little_lateness_must_last_longer_than_much() -> None:
    run = SimulatedRun(noise=0.02)
    assert run.steps(85, late(1, forward=6.0)) == []
    found = run.steps(40, late(1, forward=6.0))
    assert [(finding.state, finding.rank, finding.severity) for finding in found] == [("raised", 1, "warning")]


@pytest.mark.parametrize(("share", "severity"), [(0.06, None), (0.14, "warning"), (0.30, "critical")])
def test_lateness_counts_by_its_share_of_the_step(share: float, severity: str | None) -> None:
    run = SimulatedRun(noise=0.0)
    late_ms = 43.0 * share / (1 - share)
    found = run.steps(130, late(0, forward=late_ms))
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_two_slow_ranks_of_four_are_both_named() -> None:
    run = SimulatedRun()
    run.steps(60)
    found = run.steps(20, lambda step, rank: {"forward": 30.0} if rank in (1, 2) else {})
    assert {finding.rank for finding in found} >= {1, 2}


@pytest.mark.parametrize(
    "late_ms",
    [(0, 20, 60), (0, 60, 20), (0, 120, 200), (0, 20, 50, 60), (0, 100, 80, 90, 30)],
    ids=lambda late_ms: "-".join(map(str, late_ms)),
)
@pytest.mark.parametrize("apart", [0, 60], ids=["at once", "one after another"])
def test_a_straggler_stands_with_its_lateness_where_most_ranks_become_slow(late_ms: Sequence[int], apart: int) -> None:
    """Of three ranks "the others" are two, and of two others one may be slow."""
    run = SimulatedRun(len(late_ms))
    found = run.steps(
        400, lambda step, rank: {"forward": float(late_ms[rank])} if step >= 61 + apart * (rank - 1) else {}
    )
    assert [(each.rank, each.state) for each in found] == [(rank, "raised") for rank in range(1, len(late_ms))]
    excess_ms = {each.rank: each.evidence["excess_ms"] for each in found}
    assert excess_ms == {rank: pytest.approx(late_ms[rank], abs=1.5) for rank in range(1, len(late_ms))}


def test_lateness_within_the_noise_is_no_finding() -> None:
    """Thresholds come from the machine's own noise: 10 ms is much on a quiet machine and nothing on a noisy one."""
    quiet, noisy = SimulatedRun(noise=0.02), SimulatedRun(noise=0.6)
    quiet.steps(60)
    noisy.steps(60)
    assert summaries(quiet.steps(20, late(1, forward=10.0))) == [("straggler", "raised", 1, "forward")]
    assert noisy.steps(20, late(1, forward=10.0)) == []


@pytest.mark.parametrize(("late_ms", "is_found"), [(10.0, False), (17.0, True)])
def test_lateness_counts_by_the_deviation_of_a_windows_median(late_ms: float, is_found: bool) -> None:
    """Work varies by 8 ms from step to step, and so its median over twelve rows by two to three."""
    run = SimulatedRun(2, noise=0.3)
    run.steps(100)
    found = run.steps(40, late(1, first=101, backward=late_ms))
    assert [finding.kind for finding in found if finding.kind == "straggler"] == ["straggler"] * is_found


def test_a_small_lateness_counts_against_the_medians_of_earlier_windows() -> None:
    run = SimulatedRun(2, noise=0.15, seed=3)
    run.steps(60)
    assert summaries(run.steps(60, late(1, backward=8.0))) == [("straggler", "raised", 1, "backward")]


@pytest.mark.parametrize("part", ["data", "optimizer"])
def test_a_part_that_stands_out_of_its_noise_is_found_where_other_parts_are_noisier(part: str) -> None:
    """As where other guests of the host take uncounted time, which mostly hits the longest parts."""
    dice = random.Random(3)

    def stolen(step: int, rank: int) -> dict[str, float]:
        return {longest: dice.expovariate(1 / 25.0) for longest in ("forward", "backward")}

    run = SimulatedRun(2)
    assert {finding.kind for finding in run.steps(300, stolen)} == {"imbalance"}
    first = run.step + 1
    found = run.steps(20, lambda step, rank: {**stolen(step, rank), **({part: 30.0} if rank == 0 else {})})
    assert summaries(found) == [("straggler", "raised", 0, part)]
    assert first < (found[0].step or 0) < first + 20
    assert found[0].evidence["noise_ms"] < 30.0


TREES: dict[int, dict[int, list[int]]] = {
    2: {0: [1], 1: [0]},
    3: {0: [1, 2], 1: [0], 2: [0]},
    4: {0: [1, 2], 1: [0], 2: [0], 3: [0, 1]},
}
"""Who waits for whom in gloo's broadcast from rank 0, as measured."""


@pytest.mark.parametrize("part", ["data", "optimizer"])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_who_waits_in_its_forward_pass_for_another_rank_is_not_taken_for_slow(ranks: int, slow: int, part: str) -> None:
    run = SimulatedRun(ranks, broadcast=TREES[ranks])
    assert run.steps(60) == []
    found = run.steps(60, late(slow, **{part: 30.0}))
    assert summaries(found) == [("straggler", "raised", slow, part)]
    assert found[0].evidence["excess_ms"] == pytest.approx(30.0, rel=0.1)
    waiting = [rank for rank in TREES[ranks] if slow in TREES[ranks][rank] or (slow == 0 and rank)]
    assert found[0].evidence.get("followers", 0) == len(waiting)
    assert ("DDP broadcasts buffers" in found[0].message) == bool(waiting)
    assert summaries(run.steps(40)) == [("straggler", "cleared", slow, part)]


def test_two_ranks_that_are_slow_in_two_ways_are_both_named() -> None:
    run = SimulatedRun(4)
    run.steps(60)
    found = run.steps(20, lambda _step, rank: ({}, {"data": 30.0}, {"forward": 39.0}, {})[rank])
    assert {(f.rank, f.cause) for f in found} == {(1, "data"), (2, "forward")}
    assert not any("followers" in f.evidence for f in found), "39 ms are no wait of 30 ms"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_thousand_balanced_steps_with_a_broadcast_on_a_busy_machine_are_no_finding(seed: int) -> None:
    run = SimulatedRun(3, noise=0.15, seed=seed, broadcast=TREES[3])
    assert run.steps(1000, busy_machine(seed, bursts=True), every=5) == []


def busy_machine(seed: int, *, bursts: bool) -> Slow:
    """Other work takes a core from one rank or another, for a step or for a second."""
    dice = random.Random(seed)
    held: dict[int, int] = {}

    def slow(step: int, rank: int) -> Mapping[str, float]:
        if bursts and held.get(rank, 0) < step and dice.random() < 0.01:
            held[rank] = step + dice.randrange(1, 30)
        busy = held.get(rank, 0) >= step
        waits = {part: dice.expovariate(1 / (40.0 if busy else 8.0)) for part in ("forward", "backward")}
        return {f"{part}_wait": ms for part, ms in waits.items()}

    return slow


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_thousand_balanced_steps_on_a_busy_machine_are_no_finding(ranks: int, bursts: bool, seed: int) -> None:
    run = SimulatedRun(ranks, noise=0.15, seed=seed)
    assert run.steps(1000, busy_machine(seed, bursts=bursts), every=5) == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("bursts", [False, True])
def test_beside_a_straggler_a_thousand_balanced_steps_of_the_others_are_no_finding(ranks: int, bursts: bool) -> None:
    run, busy = SimulatedRun(ranks, noise=0.15), busy_machine(1, bursts=bursts)
    slow = late(1, data=60.0)
    found = run.steps(1000, lambda step, rank: {**busy(step, rank), **slow(step, rank)}, every=5)
    assert summaries(found) == [("straggler", "raised", 1, "data")]


def test_a_delay_is_found_among_waits_for_cores_that_are_longer() -> None:
    run = SimulatedRun(2, noise=0.1)
    busy = busy_machine(4, bursts=True)
    run.steps(60, busy)
    found = run.steps(20, lambda step, rank: {**busy(step, rank), **({"backward": 30.0} if rank == 0 else {})})
    assert summaries(found) == [("straggler", "raised", 0, "backward")]


def test_a_rank_that_shares_its_core_is_found_to_wait_for_it() -> None:
    run = SimulatedRun()
    found = run.steps(150, late(2, first=1, forward_wait=10.0, backward_wait=12.0))
    assert summaries(found) == [("straggler", "raised", 2, "core_wait")]


def test_cpu_steal_is_named_when_one_node_alone_suffers() -> None:
    run = SimulatedRun()
    for node, steal in ((0, 0.0), (1, 45.0)):
        run.state.apply(NodeSample(time=run.now, node=node, host=f"node{node}", steal_percent=steal))
    run.steps(60)
    found = run.steps(20, lambda step, rank: {"forward": 10.0, "backward": 20.0} if rank == 3 else {})
    assert summaries(found) == [("straggler", "raised", 3, "cpu_steal")]


def test_a_throttled_gpu_is_named_by_its_clock() -> None:
    run = SimulatedRun()
    for rank in range(4):
        gpu = GpuSample(index=0, uuid=f"GPU-{rank}", rank=rank, sm_clock_mhz=700 if rank == 3 else 1980)
        run.state.apply(NodeSample(time=run.now, node=rank // 2, host=f"node{rank // 2}", gpus=[gpu]))
    run.steps(60)
    found = run.steps(20, lambda step, rank: {"forward": 20.0, "backward": 40.0} if rank == 3 else {})
    assert summaries(found) == [("straggler", "raised", 3, "gpu_clock")]


def covering(run: SimulatedRun, events: int, steps: int, slow: Slow = balanced) -> list[Finding]:
    """Do steps that are so fast that an event covers several."""
    found = []
    for _ in range(events):
        rows = []
        for _ in range(steps):
            run.step += 1
            rows.append(run.one_step(slow, 2.0))
        for last, *before in zip(*reversed(rows), strict=True):
            last.sync_exposed_ms_each = [event.sync_exposed_ms for event in (*reversed(before), last)]
            for name in [name for name in last.__struct_fields__ if name.endswith("_ms")]:
                values = [getattr(event, name) for event in (last, *before)]
                if all(isinstance(value, float) for value in values):
                    setattr(last, name, sum(values) / steps)
            last.samples = sum(event.samples for event in (last, *before))
            last.tokens = sum(event.tokens or 0 for event in (last, *before)) if last.tokens else None
            last.steps, last.core_wait_ms = steps, None
            run.state.apply(last)
        found += run.diagnose()
    return found


@pytest.mark.parametrize("steps", [2, 5, 17])
def test_events_that_cover_several_steps_give_the_same_findings(steps: int) -> None:
    run = SimulatedRun(2)
    assert covering(run, 60, steps) == []
    assert summaries(covering(run, 20, steps, late(1, first=run.step + 1, optimizer=30.0))) == [
        ("straggler", "raised", 1, "optimizer")
    ]


def test_a_rank_far_slower_than_very_fast_steps_is_found_within_a_dozen_slow_ones() -> None:
    run = SimulatedRun(2)
    assert covering(run, 60, 25) == []
    slow = late(1, first=run.step + 1, forward=200.0)
    assert covering(run, 3, 2, slow) == []
    assert summaries(covering(run, 3, 2, slow)) == [("straggler", "raised", 1, "forward")]
    assert summaries(covering(run, 40, 25)) == [("straggler", "cleared", 1, "forward")]


def test_a_rank_that_slows_very_fast_steps_soon_after_the_start_is_found_once() -> None:
    run = SimulatedRun(2)
    assert covering(run, 6, 4) == []
    assert summaries(covering(run, 40, 1, late(1, first=run.step + 1, forward=200.0))) == [
        ("straggler", "raised", 1, "forward")
    ]


@pytest.mark.parametrize("covered", [(2, 2, 1), (1, 1, 1, 2), (2, 1)])
def test_slow_steps_are_found_as_soon_where_events_cover_different_numbers_of_steps(
    covered: tuple[int, ...],
) -> None:
    run = SimulatedRun(2)
    assert covering(run, 60, 6) == []
    first = run.step + 1
    found: list[Finding] = []
    while not found and run.step < first + 30:
        for steps in covered:
            found += covering(run, 1, steps, late(1, first=first, data=200.0))
    assert summaries(found) == [("straggler", "raised", 1, "data")]
    assert found[0].step is not None
    assert found[0].step < first + 14


def test_a_few_slow_steps_among_very_fast_ones_are_no_straggler() -> None:
    run = SimulatedRun(2)
    assert covering(run, 60, 25) == []
    for _ in range(5):
        assert covering(run, 4, 2, late(1, first=run.step + 1, forward=200.0)) == []
        assert covering(run, 12, 25) == []


def test_a_rank_whose_parts_are_all_longer_for_a_moment_is_no_straggler() -> None:
    run = SimulatedRun(2)
    assert covering(run, 60, 6) == []
    assert covering(run, 8, 2, late(1, first=run.step + 1, forward=80.0, backward=90.0, optimizer=60.0)) == []
    assert covering(run, 40, 6) == []


@pytest.mark.parametrize("steps", [2, 17])
def test_events_that_cover_several_noisy_balanced_steps_are_no_finding(steps: int) -> None:
    assert covering(SimulatedRun(2, noise=0.5), 400, steps) == []


def test_a_slow_network_is_found_step_by_step_within_events() -> None:
    found = covering(SimulatedRun(2, wire_ms=50.0), 80, 6)
    assert summaries(found) == [("communication_bound", "raised", None, "communication")]
    assert found[0].evidence["wire_exposed_ms"] == pytest.approx(50.0, rel=0.1)


def test_steps_that_become_slower_than_the_record_merges_are_judged_one_by_one() -> None:
    run = SimulatedRun(2)
    assert covering(run, 30, 2) == []
    found = run.steps(20, late(1, backward=30.0))
    assert summaries(found) == [("straggler", "raised", 1, "backward")]


def holding(run: SimulatedRun, number: int, models: str) -> list[Finding]:
    """Let each rank record a checksum; ranks with the same letter hold the same model."""
    for rank, letter in enumerate(models):
        run.state.apply(Checksum(time=run.now, rank=rank, step=number, parameters=letter, buffers=""))
    return run.diagnose()


def test_a_rank_with_another_checksum_is_named_once_until_the_ranks_agree() -> None:
    run = SimulatedRun(4)
    assert holding(run, 100, "aaaa") == []
    (found,) = holding(run, 200, "aaba")
    assert summaries([found]) == [("desync", "raised", 2, "parameters")]
    assert (found.severity, found.step, found.host) == ("critical", 200, "node1")
    assert found.message == "rank 2 holds different parameters than the others"
    assert holding(run, 300, "aaca") == []
    assert summaries(holding(run, 400, "dddd")) == [("desync", "cleared", 2, "parameters")]


def test_a_desync_found_by_the_ranks_is_not_raised_again() -> None:
    run = SimulatedRun(2)
    run.state.apply(Finding(time=run.now, kind="desync", rank=1, cause="parameters", message="first in parameter w"))
    assert holding(run, 100, "ab") == []


def test_a_step_whose_synchronisation_was_not_measured_changes_nothing() -> None:
    run = SimulatedRun(2)
    assert summaries(run.steps(80, late(1, forward=30.0))) == [("straggler", "raised", 1, "forward")]
    run.step += 1
    for event in run.one_step(late(1, forward=30.0), 2.0):
        event.sync_exposed_ms = event.sync_ms = None
        run.state.apply(event)
    assert run.diagnose() == []


def test_ranks_that_do_not_wait_for_each_other_have_no_straggler() -> None:
    run = SimulatedRun(2)
    for _ in range(100):
        run.step += 1
        for event in run.one_step(late(1, forward=30.0), 2.0):
            event.sync_exposed_ms = event.sync_ms = None
            run.state.apply(event)
        assert run.diagnose() == []


def test_a_single_rank_is_no_straggler() -> None:
    assert SimulatedRun(1).steps(200, late(0, forward=50.0)) == []


def test_a_rank_that_has_not_reported_is_waited_for() -> None:
    run = SimulatedRun(2)
    run.state.rank(2)
    assert run.steps(100, late(1, first=1, forward=30.0)) == []


def test_a_restarted_run_is_judged_anew() -> None:
    run = SimulatedRun(2)
    assert summaries(run.steps(80, late(1, forward=30.0))) == [("straggler", "raised", 1, "forward")]
    for rank in (0, 1):
        run.state.apply(RankState(time=run.now, rank=rank, state="spawned"))
    assert summaries(run.diagnose()) == [("straggler", "cleared", 1, "forward")]
    assert run.steps(60) == []


# --- what binds a run -----------------------------------------------------------------------------------------------


def test_waiting_for_data_on_all_ranks_is_input_bound() -> None:
    run = SimulatedRun()
    found = run.steps(100, lambda _step, _rank: {"data": 40.0})
    assert summaries(found) == [("input_bound", "raised", None, "data")]
    assert found[0].evidence["data_share"] == pytest.approx(0.48, abs=0.05)
    assert found[0].severity == "warning"
    assert summaries(run.steps(100)) == [("input_bound", "cleared", None, "data")]


def test_a_slow_reader_alone_does_not_bind_the_run() -> None:
    assert summaries(SimulatedRun(2).steps(150, late(1, first=1, data=60.0))) == [("straggler", "raised", 1, "data")]


def test_bare_transfers_bind_a_run_but_waiting_for_a_late_rank_does_not() -> None:
    found = SimulatedRun(wire_ms=50.0).steps(100)
    assert summaries(found) == [("communication_bound", "raised", None, "communication")]
    assert "update_freq" in found[0].advice
    assert found[0].evidence["wire_exposed_ms"] == pytest.approx(50.0, rel=0.1)
    late_rank = SimulatedRun().steps(100, late(0, first=1, forward=80.0))
    assert {finding.kind for finding in late_rank} == {"straggler"}


def test_transfers_on_a_machine_without_enough_cores_are_not_the_network_s() -> None:
    run = SimulatedRun(wire_ms=50.0)
    assert run.steps(100, lambda _step, _rank: {"forward_wait": 20.0, "backward_wait": 20.0}) == []


# --- health ---------------------------------------------------------------------------------------------------------


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("before", [0, 1, 40], ids=["from step 1 on", "from step 2 on", "later"])
@pytest.mark.parametrize("loss", [NAN, INFINITE], ids=["nan", "inf"])
def test_a_loss_that_is_no_number_is_a_finding(loss: float, before: int) -> None:
    run = SimulatedRun(2)
    run.steps(before)
    found = run.steps(3, loss=loss)
    first = before + 1
    assert summaries(found) == [("non_finite", "raised", 0, "loss")]
    assert found[0].ranks == [0, 1]
    assert run_mark(found) == f"NaN since step {first} on ranks 0, 1"
    message = f"the loss of all 2 ranks has been NaN or infinite since step {first}"
    assert found[0].message.startswith(message)
    assert f"a checkpoint from before step {first}" in found[0].advice
    assert run.steps(2 * HISTORY, loss=loss) == [], "it stands for as long as it lasts"
    assert summaries(run.steps(1)) == [("non_finite", "cleared", 0, "loss")]


@pytest.mark.parametrize("going", [True, False], ids=["a rank recorded later", "a rank that hangs"])
def test_a_loss_that_is_no_number_is_reported_once_every_rank_that_goes_on_has_recorded_the_step(going: bool) -> None:
    run = SimulatedRun(3)
    run.steps(10)
    run.step += 1
    late, *others = run.one_step(balanced, NAN)
    run.state.apply_all(others)
    assert run.diagnose() == []
    if going:
        run.state.apply(late)
        (found,) = run.diagnose()
        assert (found.ranks, run_mark([found])) == ([0, 1, 2], "NaN since step 11 on ranks 0 to 2")
    else:
        run.now += RECORD_LAG_S + 1.0
        (found,) = (each for each in run.diagnose() if each.kind == "non_finite")
        assert found.ranks == [1, 2]
        run.state.apply(late)
        (found,) = (each for each in run.diagnose() if each.kind == "non_finite")
        assert (found.state, found.ranks) == ("raised", [0, 1, 2]), "its record came later still"
        assert not any(each.kind == "non_finite" for each in run.diagnose())


def test_a_rank_alone_with_a_loss_that_is_no_number_is_named_alone() -> None:
    run = SimulatedRun(2)
    run.steps(10)
    run.step += 1
    first, second = run.one_step(balanced, 2.0)
    second.loss, second.non_finite = None, ["loss"]
    run.state.apply_all((first, second))
    (found,) = run.diagnose()
    assert (found.rank, found.ranks, run_mark([found])) == (1, [], "NaN since step 11 on rank 1")


def test_a_loss_is_judged_where_samples_are_not_counted_and_as_the_record_has_it() -> None:
    run = SimulatedRun(1)
    for step in range(1, 11):
        run.step = step
        (event,) = run.one_step(balanced, NAN if step > 5 else 2.0)
        event.samples = 0
        run.state.apply_all(decode_events(encode_event(event)))
    assert summaries(run.diagnose()) == [("non_finite", "raised", 0, "loss")]
    assert run.state.findings["non_finite", 0].step == 6


def test_of_an_event_over_several_steps_the_first_one_that_is_no_number_is_named() -> None:
    run = SimulatedRun(1)
    steps = []
    for step in range(1, 9):
        run.step = step
        (event,) = run.one_step(balanced, NAN if step > 5 else 2.0)
        steps.append(event)
    run.state.apply_all(decode_events(encode_event(merge(steps))))
    (found,) = run.diagnose()
    assert (found.kind, found.step) == ("non_finite", 6)


def norms(run: SimulatedRun, *norms: float | None) -> list[Finding]:
    """Do a step for each gradient norm of all ranks."""
    found = []
    for norm in norms:
        run.step += 1
        for event in run.one_step(balanced, 2.0):
            event.grad_norm = norm
            event.non_finite = ["grad_norm"] if norm is not None and not math.isfinite(norm) else []
            run.state.apply(event)
        found += run.diagnose()
    return found


def test_the_first_rank_that_is_not_finite_stays_the_one_that_is_named() -> None:
    run = SimulatedRun(3)
    run.steps(40)
    run.step += 1
    events = run.one_step(balanced, 2.0)
    events[1].loss, events[1].non_finite = NAN, ["loss"]
    run.state.apply_all(events)
    found = run.diagnose() + run.steps(5, loss=NAN)
    assert summaries(found) == [("non_finite", "raised", 1, "loss")]
    assert found[0].message.startswith("the loss of rank 1 has been NaN or infinite since step 41")


def test_a_step_that_a_loss_scaler_skips_is_none_and_gradients_that_stay_so_are() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    for _ in range(3):
        assert norms(run, INFINITE, NAN, 1.0, 1.0) == []
    assert norms(run, None, None, None, None) == []
    assert summaries(norms(run, INFINITE, INFINITE, NAN, NAN)) == [("non_finite", "raised", 0, "grad_norm")]


def test_a_loss_reported_only_at_some_steps_is_no_finding() -> None:
    run = SimulatedRun(2)
    found = []
    for _ in range(40):
        found += run.steps(1, loss=2.0) + run.steps(2, loss=None)
    assert found == []


def test_a_jump_of_the_loss_is_a_finding_and_a_single_high_one_is_not() -> None:
    run = SimulatedRun(2)
    for _ in range(40):
        run.steps(1, loss=2.0 + run.random.gauss(0, 0.05))
    assert run.steps(1, loss=9.0) == []
    assert run.steps(3, loss=2.0) == []
    assert summaries(run.steps(4, loss=9.0)) == [("loss_spike", "raised", None, None)]


@pytest.mark.parametrize(
    ("steps", "noise", "loss", "is_finding"),
    [
        pytest.param(40, 0.05, 3.4, True, id="seven tenths of the loss"),
        pytest.param(40, 0.05, 2.7, False, id="a third of the loss"),
        pytest.param(60, 0.3, 4.1, False, id="seven deviations"),
    ],
)
def test_a_jump_of_the_loss_counts_by_its_height(steps: int, noise: float, loss: float, is_finding: bool) -> None:
    run = SimulatedRun(2)
    for _ in range(steps):
        run.steps(1, loss=2.0 + run.random.gauss(0, noise))
    assert bool(run.steps(4, loss=loss)) == is_finding


# --- stalls ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_no_step_while_the_others_wait_is_named() -> None:
    run = SimulatedRun(4)
    run.steps(40)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank != 2])
    run.state.apply(NodeSample(time=run.now, node=1, host="node1", ranks=[RankSample(rank=2, cpu_percent=99.0)]))
    assert run.diagnose(5.0) == []
    found = run.diagnose(10.0)
    assert summaries(found) == [("stalled", "raised", 2, "busy")]
    assert "rank 2 on node1 has done no step for" in found[0].message
    assert found[0].evidence["last_step"] == 40


@pytest.mark.parametrize("begins_at", [0, 40], ids=["a script counts from 1", "a task goes on counting"])
@pytest.mark.parametrize(("timeout_s", "after_s"), [(None, 55.0), (12.0, 8.0)])
def test_a_rank_that_hangs_at_its_first_step_after_a_restart_is_named(
    begins_at: int, timeout_s: float | None, after_s: float
) -> None:
    run = SimulatedRun(2)
    run.diagnosis.stall_timeout_s = timeout_s
    run.diagnose()
    run.now += 8.0  # so long the first step took
    run.steps(40)
    for rank in (0, 1):
        run.state.apply(RankState(time=run.now, rank=rank, state="spawned", pid=2))
        run.state.apply(RankState(time=run.now + 0.1, rank=rank, state="training", pid=2))
    assert run.diagnose() == run.diagnose(20.0) == []  # imports and data
    waits = Doing(time=run.now, rank=0, step=begins_at + 1, part="sync", parts_done=4, waited_ms=5000.0)
    run.state.apply(waits)
    assert run.diagnose() == []
    assert run.diagnose(after_s - 2.0) == []
    (finding,) = run.diagnose(2.0)
    assert (finding.kind, finding.rank, finding.evidence["last_step"]) == ("stalled", 1, 0.0)
    assert finding.message.startswith("rank 1 on node0 has done no step for more than ")
    assert "after step" not in finding.message
    failure = run.diagnosis.hang(run.state, run.now, timeout_s=12.0, limit_s=600.0)
    assert failure is not None
    assert failure.message == f"rank 1 on node0 hangs; the others waited {int(5 + after_s)} s for it"


def test_a_run_without_steps_is_stalled_and_cleared_when_it_goes_on() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    run.diagnose()
    assert run.diagnose(15.0) == []
    assert summaries(run.diagnose(20.0)) == [("stalled", "raised", None, None)]
    assert summaries(run.steps(1)) == [("stalled", "cleared", None, None)]


@pytest.mark.parametrize(
    ("cpu", "rank"),
    [([2.0, 99.0], 1), ([2.0, 1.0], None), ([99.0, 2.0, 98.0, 99.0], 1), ([99.0, 98.0, 2.0, 1.0], None)],
    ids=["one computes", "all wait", "one waits for something else", "two and two"],
)
def test_of_ranks_at_the_same_step_the_one_that_does_something_else_is_named(
    cpu: list[float], rank: int | None
) -> None:
    run = SimulatedRun(len(cpu))
    run.steps(40)
    samples = [RankSample(rank=rank, cpu_percent=percent) for rank, percent in enumerate(cpu)]
    run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
    run.diagnose()
    assert [(finding.kind, finding.rank) for finding in run.diagnose(25.0)] == [("stalled", rank)]


def test_the_rank_that_is_at_an_earlier_part_of_the_step_is_named_with_that_part() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    run.diagnose()
    last = "its last collectives are all_reduce 81, all_reduce 82; 82 of 82 are complete"
    for rank, part, done in ((0, "sync", 4), (1, "forward", 2)):
        doing = Doing(time=run.now + 5.0, rank=rank, step=41, part=part, parts_done=done, waited_ms=5000.0)  # type: ignore[arg-type]
        doing.collectives = last if rank == 1 else ""
        run.state.apply(doing)
    found = run.diagnose(12.0)
    assert summaries(found) == [("stalled", "raised", 1, "forward")]
    assert found[0].message.endswith(f"rank 1 is in its forward pass; {last}")
    assert summaries(run.steps(1)) == [("stalled", "cleared", 1, "forward")]
    assert run.state.ranks[1].doing is None


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ([(42, "sync", 4), (41, "optimizer", 7)], 1),
        ([(41, "backward", 6), (42, "data", 0)], 0),
        ([(41, "optimizer", 4), (41, "optimizer", 4), (42, "forward", 2)], None),
        ([(41, "sync", 4), (41, "sync", 4), (41, "data", 0)], 2),
        ([(41, "sync", 4), (41, "sync", 4), None], 2),
        ([(42, "group", 0), (42, "group", 0), (41, "optimizer", 9)], 2),
    ],
    ids=[
        "fewer parts of a later step",
        "no part of a later step",
        "most in an earlier step",
        "one step",
        "silent",
        "outside of steps",
    ],
)
def test_progress_is_compared_by_the_step_that_each_rank_is_in_and_then_within_it(
    places: list[tuple[int, str, int] | None], behind: int | None
) -> None:
    """A GPU, or events that share a line, may hold back the record of a step that a rank has done."""
    run = SimulatedRun(len(places))
    run.steps(40)
    run.diagnose()
    for rank, place in enumerate(places):
        if place is not None:
            step, part, done = place
            run.state.apply(
                Doing(time=run.now + 5.0, rank=rank, step=step, part=part, parts_done=done, waited_ms=5000.0)  # type: ignore[arg-type]
            )
    run.diagnose()
    assert [(finding.kind, finding.rank) for finding in run.diagnose(30.0)] == [("stalled", behind)]


def test_ranks_that_are_all_busy_between_two_steps_may_be_evaluating() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    samples = [RankSample(rank=rank, cpu_percent=98.0) for rank in (0, 1)]
    run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
    assert run.diagnose(250.0) == []
    assert summaries(run.diagnose(60.0)) == [("stalled", "raised", None, "busy")]


def test_a_rank_that_spins_without_a_core_is_not_idle() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    samples = [
        RankSample(rank=0, cpu_percent=1.0, wait_percent=0.5),
        RankSample(rank=1, cpu_percent=12.0, wait_percent=85.0),
    ]
    run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
    run.diagnose()
    assert summaries(run.diagnose(25.0)) == [("stalled", "raised", 1, "busy")]


def test_ranks_that_have_finished_do_not_wait_for_one_that_has_done_as_many_steps() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    run.state.apply(RankState(time=run.now, rank=0, state="finished"))
    run.diagnose()
    assert run.diagnose(600.0) == []


def test_a_rank_that_ended_in_the_middle_is_named_when_the_others_hang() -> None:
    run = SimulatedRun(3)
    run.steps(40)
    run.state.apply(RankState(time=run.now, rank=1, state="finished"))
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank != 1])
    run.diagnose()
    (found,) = run.diagnose(15.0)
    assert (found.kind, found.rank, found.cause) == ("stalled", 1, "left")
    assert found.message.startswith(
        "rank 1 has ended after step 40, and the others have done no step for more than 15 s"
    )


def run_out(run: SimulatedRun, rank: int, *, steps: int) -> None:
    """Let the others do steps of three seconds without a rank, as in DDP's join()."""
    for _ in range(steps):
        run.step += 1
        events = run.one_step(lambda _step, _rank: {"forward": 3000.0}, 2.0)
        run.state.apply_all([event for event in events if event.rank != rank])
        run.diagnose()


@pytest.mark.parametrize("state", ["training", "finished"])
def test_a_rank_without_which_the_others_train_on_is_no_stall(state: str) -> None:
    run = SimulatedRun(3)
    run.steps(40)
    run_out(run, 0, steps=30)
    if state == "finished":
        enter(run, "finished", 0)
    assert ("stalled", 0) not in run.state.findings
    for _ in range(3):  # an evaluation, for one
        run.diagnose(12.0)
        assert ("stalled", 0) not in run.state.findings
    assert [f.message for f in run.state.findings.values() if f.kind == "straggler"] == []


def test_of_those_that_train_on_the_one_that_does_no_step_is_named() -> None:
    run = SimulatedRun(3)
    run.steps(40)
    run_out(run, 0, steps=30)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank == 2])
    run.diagnose()
    found = run.diagnose(70.0)
    assert [(finding.kind, finding.rank) for finding in found] == [("stalled", 1)]


def test_of_long_steps_the_rank_that_does_not_end_one_after_the_synchronisation_is_named() -> None:
    """The others lead by one step, which took longer than the least patience: they wait for it all the same."""
    run = SimulatedRun(2)
    run.steps(20, lambda _step, _rank: {"forward": 12_000.0}, every=1)
    run.step += 1
    run.state.apply_all([event for event in run.one_step(lambda *_: {"forward": 12_000.0}, 2.0) if event.rank == 0])
    run.diagnose()
    assert [(finding.kind, finding.rank) for finding in run.diagnose(300.0)] == [("stalled", 1)]


def enter(run: SimulatedRun, state: str, *ranks: int, after_s: float = 0.0) -> None:
    run.now += after_s
    for rank in ranks:
        run.state.apply(RankState(time=run.now, rank=rank, state=state))  # type: ignore[arg-type]
    run.diagnose()


def wait_for_all(run: SimulatedRun, *ranks: int, after_s: float = 0.0) -> None:
    """Let ranks have done their own part and wait for all others outside of steps."""
    run.now += after_s
    for rank in ranks:
        run.state.apply(Doing(time=run.now, rank=rank, step=run.step + 1, part="group", parts_done=0, waited_ms=0.0))
    run.diagnose()


@pytest.mark.parametrize("took_s", [1.0, 30.0])
def test_in_a_validation_the_rank_that_takes_several_times_as_long_is_named(took_s: float) -> None:
    run = SimulatedRun(3)
    run.steps(40)
    enter(run, "validating", 0, 1, 2)
    wait_for_all(run, 0, 2, after_s=took_s)
    patience_s = max(10.0, 4 * took_s) - took_s
    assert run.diagnose(patience_s - 1.0) == []
    (found,) = run.diagnose(2.0)
    assert (found.kind, found.rank) == ("stalled", 1)
    assert "rank 1 on node0 has been validating for" in found.message
    assert "and the others wait for it" in found.message
    wait_for_all(run, 1)
    assert ("stalled", 1) not in run.state.findings


def test_a_rank_that_others_wait_for_before_training_is_said_to_be_at_its_line_and_not_to_wait() -> None:
    run = SimulatedRun(2)
    enter(run, "ready", 0, 1)
    wait_for_all(run, 0, 1)
    enter(run, "training", 0, after_s=1.0)
    run.state.apply(Doing(time=run.now, rank=0, step=1, part="sync", parts_done=4, waited_ms=0.0))
    ranks = [RankSample(rank=0, cpu_percent=0.0), RankSample(rank=1, cpu_percent=0.0, line="task.py:30 in state_dict")]
    for _ in range(60):
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=ranks))
        run.diagnose(1.0)
    found = run.state.findings["stalled", 1]
    assert re.match(
        r"rank 1 on node0 has been at task.py:30 in state_dict for more than \d+ s, and the others wait for it",
        found.message,
    )
    assert "waiting for the others" not in found.message


def test_a_validation_may_last_some_times_as_long_as_the_longest_before() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    enter(run, "validating", 0, 1)
    enter(run, "training", 0, 1, after_s=50.0)
    run.steps(40)
    enter(run, "validating", 0, 1)
    assert run.diagnose(190.0) == []
    (found,) = run.diagnose(15.0)
    assert (found.kind, found.rank) == ("stalled", None)
    assert found.message.startswith("every rank has been validating for more than 205 s, after step 80")


def test_a_rank_that_does_not_begin_a_validation_is_awaited_by_those_that_have() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    enter(run, "validating", 0)
    (found,) = run.diagnose(12.0)
    assert (found.rank, found.kind) == (1, "stalled")


def test_a_first_save_may_take_minutes_while_something_is_written_and_a_later_one_some_times_as_long() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    enter(run, "saving", 0)
    assert run.diagnose(250.0) == []
    enter(run, "training", 0, after_s=10.0)
    run.steps(10)
    enter(run, "saving", 0)
    assert run.diagnose(1000.0) == []
    assert summaries(run.diagnose(100.0)) == [("stalled", "raised", None, None)]


def starting(ranks: int, state: str) -> SimulatedRun:
    run = SimulatedRun(ranks)
    run.state = RunState(world_size=ranks, history=HISTORY)
    enter(run, state, *range(ranks))
    return run


@pytest.mark.parametrize("took_s", [0.5, 5.0])
def test_in_the_first_step_the_rank_whose_gradients_the_others_wait_for_is_named(took_s: float) -> None:
    run = starting(2, "training")
    begun = run.now
    run.now += took_s + 5.0
    for rank, part, done in ((0, "sync", 4), (1, "forward", 2)):
        run.state.apply(
            Doing(time=run.now, rank=rank, step=1, part=part, parts_done=done, waited_ms=5000.0)  # type: ignore[arg-type]
        )
    patience_s = max(10.0, 4 * took_s)  # from when the others wait
    assert run.diagnose() == run.diagnose(begun + took_s + patience_s - 1.0 - run.now) == []
    (found,) = run.diagnose(2.0)
    assert (found.kind, found.rank, found.cause) == ("stalled", 1, "forward")


@pytest.mark.parametrize(
    ("state", "words"),
    [("ready", "has been getting ready for more than 12 s"), ("training", "has done no step for more than 12 s")],
)
def test_before_the_first_step_the_rank_that_the_others_wait_for_is_named(state: str, words: str) -> None:
    run = starting(3, state)
    if state == "ready":
        wait_for_all(run, 0, 1, after_s=2.0)
    else:
        run.step += 1
        run.state.apply_all([event for event in run.one_step(balanced, 2.0) if event.rank != 2])
        run.diagnose(2.0)
    assert run.diagnose(7.0) == []
    (found,) = run.diagnose(3.0)
    assert (found.kind, found.rank) == ("stalled", 2)
    assert f"rank 2 {words}" in found.message


def test_while_ranks_join_those_that_are_missing_are_named() -> None:
    run = starting(3, "joining")
    run.state.apply(Joining(time=run.now, joined=[0, 2], missing=[1], waited_ms=1000.0))
    run.diagnose()
    assert run.diagnose(55.0) == []
    (found,) = run.diagnose(10.0)
    assert (found.kind, found.rank) == ("stalled", 1)
    assert "rank 1 has been joining for more than 65 s" in found.message


def sampled(run: SimulatedRun, seconds: int, *percents: float, wait_percent: float = 0.0) -> list[Finding]:
    """Let as many seconds pass, each with a look at the ranks' processes."""
    found = []
    for _ in range(seconds):
        run.now += 1.0
        samples = [
            RankSample(rank=rank, cpu_percent=percent, wait_percent=wait_percent)
            for rank, percent in enumerate(percents)
        ]
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
        found += run.diagnose()
    return found


def test_ranks_without_step_events_are_judged_by_their_processes() -> None:
    run = starting(2, "training")
    assert sampled(run, 1000, 6.0, 100.0) == []
    assert sampled(run, 59, 0.0, 3.0) == []
    (found,) = sampled(run, 3, 0.0, 3.0)
    assert (found.kind, found.rank, found.cause) == ("stalled", None, "idle")
    assert summaries(sampled(run, 1, 0.0, 40.0)) == [("stalled", "cleared", None, "idle")]
    assert sampled(run, 200, 0.0, 0.0) == []  # it has once been as quiet as that for a minute, and went on
    assert len(sampled(run, 100, 0.0, 0.0)) == 1


def test_a_process_that_wakes_now_and_then_on_a_busy_machine_is_idle() -> None:
    run = starting(2, "training")
    (found,) = sampled(run, 62, 0.5, 1.0, wait_percent=8.0)
    assert (found.kind, found.rank, found.cause) == ("stalled", None, "idle")


def test_among_idle_ranks_without_steps_the_computing_one_is_named() -> None:
    run = starting(3, "training")
    assert sampled(run, 299, 0.0, 99.0, 0.0) == []
    (found,) = sampled(run, 3, 0.0, 99.0, 0.0)
    assert (found.kind, found.rank, found.cause) == ("stalled", 1, "busy")


@pytest.mark.parametrize(
    ("places", "rank"),
    [
        (["futex_wait_queue", "hrtimer_nanosleep"], 1),
        (["futex_do_wait", "futex_do_wait", "do_signal_stop"], 2),
        (["futex_wait_queue", "futex_wait_queue"], None),
        (["hrtimer_nanosleep", "do_sys_poll"], None),
        (["futex_wait_queue", None], None),
        ([None, None], None),
    ],
)
def test_of_ranks_that_all_do_nothing_the_one_that_does_not_wait_at_a_lock_is_named(
    places: list[str | None], rank: int | None
) -> None:
    run = starting(len(places), "training")
    for _ in range(62):
        run.now += 1.0
        samples = [RankSample(rank=each, cpu_percent=0.0, sleeps_in=place) for each, place in enumerate(places)]
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
        found = run.diagnose()
        if found:
            break
    assert [(finding.kind, finding.rank) for finding in found] == [("stalled", rank)]
    if rank is not None:
        assert f"the process of rank {rank} sleeps in kernel function {places[rank]}, unlike" in found[0].message


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["", ""], " s"),
        (["a.py:3 in load", ""], " s; rank 0 is at a.py:3 in load"),
        (["a.py:3 in f", "b.py:4 in g", "a.py:3 in f"], " s; rank 1 is at b.py:4 in g; 2 ranks are at a.py:3 in f"),
    ],
)
def test_a_run_that_stands_still_names_the_lines_of_its_ranks(lines: list[str], text: str) -> None:
    run = starting(len(lines), "training")
    for _ in range(62):
        run.now += 1.0
        samples = [RankSample(rank=each, cpu_percent=0.0, line=line) for each, line in enumerate(lines)]
        run.state.apply(NodeSample(time=run.now, node=0, host="node0", ranks=samples))
        found = run.diagnose()
        if found:
            break
    said = r"no step was seen, and every rank has done nothing for more than \d+"
    assert re.fullmatch(said + text, found[0].message)


def test_a_failure_does_not_clear_a_stall() -> None:
    run = SimulatedRun(2)
    run.steps(40)
    wait_for_all(run, 0)
    (found,) = run.diagnose(12.0)
    assert found.rank == 1
    lost = Failure(time=run.now, kind="lost_peer", rank=0, message="Timed out waiting 10000ms for recv operation")
    run.state.apply_all([RankState(time=run.now, rank=0, state="failed"), lost])
    assert run.diagnose(1.0) == []
    assert ("stalled", 1) in run.state.findings


def test_patience_grows_with_the_length_of_steps() -> None:
    run = SimulatedRun(2)
    run.steps(40, lambda _step, _rank: {"forward": 3000.0})
    run.diagnose()
    assert run.diagnose(40.0) == []
    assert summaries(run.diagnose(30.0)) == [("stalled", "raised", None, None)]


# --- all together ---------------------------------------------------------------------------------------------------


def test_findings_of_ranks_are_passed_on_and_not_repeated() -> None:
    run = SimulatedRun(2)
    run.state.apply(Finding(time=run.now, kind="desync", severity="critical", rank=1, message="other parameters"))
    assert run.steps(60) == []
    assert ("desync", 1) in run.state.findings
    run.diagnosis = Diagnosis()
    assert run.steps(60) == [], "another supervisor does not clear it either"


def test_a_desync_found_by_comparing_the_record_is_cleared_by_another_supervisor() -> None:
    run = SimulatedRun(4)
    assert summaries(holding(run, 100, "aaba")) == [("desync", "raised", 2, "parameters")]
    run.diagnosis = Diagnosis()
    assert holding(run, 200, "aaba") == []
    assert summaries(holding(run, 300, "cccc")) == [("desync", "cleared", 2, "parameters")]


def test_a_new_diagnosis_keeps_the_raised_findings() -> None:
    run = SimulatedRun(2)
    slow = late(1, forward=30.0)
    run.steps(80, slow)
    run.diagnosis = Diagnosis()
    assert run.steps(20, slow) == []
    assert summaries(run.steps(40)) == [("straggler", "cleared", 1, "forward")]


def test_a_state_without_history_is_diagnosed_as_nothing() -> None:
    run = SimulatedRun(2)
    run.state = RunState(world_size=2)
    assert run.steps(100, late(1, forward=30.0)) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], [0.0]),
        ([1.0, 4.0], [-3.0, 3.0]),
        ([1.0, 2.0, 9.0], [-4.5, -3.0, 7.5]),
        ([2.0, 2.0, 2.0, 8.0], [0.0, 0.0, 0.0, 6.0]),
    ],
)
def test_excess_is_over_the_median_of_the_others(values: list[float], expected: list[float]) -> None:
    assert excess(values) == expected


def test_measures_of_noise_are_deaf_to_outliers() -> None:
    noise = random.Random(5)
    values = [noise.gauss(10.0, 1.0) for _ in range(400)]
    values[::40] = [1000.0] * 10
    assert spread(values) == pytest.approx(1.0, rel=0.25)
    assert jitter(values) == pytest.approx(1.0, rel=0.25)
    assert lower_quartile([4.0, 1.0, 3.0, 2.0]) == 2.0
    assert midmean([1000.0, 2.0, 0.0, 0.0, 2.0, 2.0, 0.0, -1000.0]) == 1.0
