"""Findings of ranks that synchronise in several process groups, with and without a group of all ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import finding_summary
from trainer.contract.record import (
    Collective,
    CollectiveCall,
    CollectiveGroup,
    Doing,
    Finding,
    GroupSync,
    RankStacks,
    RankState,
    Step,
)

Part = tuple[str, float | str, str]
"""A phase, its ms and nothing; or ``sync``, the name of a group and an operation."""

MESH_2X2 = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
WORLD = {"world": [[0, 1, 2, 3]]}
TENSOR_PARALLEL: list[Part] = [
    ("data", 2.0, ""), ("forward", 8.0, ""), ("sync", "tp", "all_reduce"), ("forward", 8.0, ""),
    ("sync", "tp", "all_reduce"), ("backward", 20.0, ""), ("sync", "tp", "all_reduce"), ("backward", 12.0, ""),
    ("sync", "dp", "reduce_scatter_tensor"), ("optimizer", 6.0, ""), ("other", 1.0, ""),
]  # fmt: skip
LAYERS = 4
FSDP: list[Part] = [
    ("data", 2.0, ""),
    *[("sync", "world", "all_gather_into_tensor"), ("forward", 4.0, "")] * LAYERS,
    *[("sync", "world", "all_gather_into_tensor"), ("backward", 8.0, ""), ("sync", "world", "reduce_scatter_tensor")]
    * LAYERS,
    ("optimizer", 6.0, ""),
]  # fmt: skip
PHASES = ("data", "forward", "backward", "optimizer", "other")


class ParallelRun:
    """A run whose ranks each go through the parts of a step, and wait in a collective for the last of its group."""

    def __init__(
        self,
        parts: Sequence[Part],
        groups: Mapping[str, Sequence[Sequence[int]]],
        *,
        ranks: int = 4,
        wire_ms: float = 0.3,
        noise: float = 0.05,
        seed: int = 1,
        covered: int = 1,
        phases: bool = True,
    ) -> None:
        """Begin; ``covered`` steps are one event, and without ``phases`` only steps and collectives are measured."""
        self.parts, self.groups = parts, groups
        self.wire_ms, self.noise, self.covered, self.phases = wire_ms, noise, covered, phases
        self.random = random.Random(seed)
        self.state = RunState(world_size=ranks, history=HISTORY)
        self.diagnosis = Diagnosis()
        self.clocks = [0.0] * ranks
        self.step = 0
        self.pending: list[list[Step]] = [[] for _ in range(ranks)]
        for rank in range(ranks):
            self.state.apply(RankState(time=1.0, rank=rank, state="training", node=0, host="node0", device="cpu"))
            for name, members in groups.items():
                own = next((list(each) for each in members if rank in each), None)
                if own is not None:
                    self.state.apply(CollectiveGroup(time=1.0, rank=rank, name=name, ranks=own, backend="gloo"))

    def steps(self, count: int, late: Mapping[tuple[int, int], float] | None = None) -> list[Finding]:
        """Do so many steps; ``late``: rank and index of a part to what it takes longer, ms."""
        found: list[Finding] = []
        for _ in range(count):
            self.one_step(late or {})
            if self.step % 3 == 0:
                new = self.diagnosis.update(self.state, 1.0 + max(self.clocks) / 1e3)
                self.state.apply_all(new)
                found += new
        return found

    def stand_still(self, seconds: float, waits_in: Mapping[int, str], **parts_done: int) -> list[Finding]:
        """Let ranks wait in a collective, or work in their forward pass where that is empty."""
        now = 1.0 + max(self.clocks) / 1e3
        for rank, collective in waits_in.items():
            part: Any = "sync" if collective else "forward"
            done = parts_done.get(f"rank{rank}", 1) + bool(collective)
            step = self.step + 1
            doing = Doing(
                time=now, rank=rank, step=step, part=part, parts_done=done, waited_ms=6e3, waits_in=collective
            )
            self.state.apply(doing)
        self.diagnosis.update(self.state, now)
        found = self.diagnosis.update(self.state, now + seconds)
        self.state.apply_all(found)
        return found

    def one_step(self, late: Mapping[tuple[int, int], float]) -> None:
        self.step += 1
        count = len(self.clocks)
        begins = list(self.clocks)
        own: list[dict[str, float]] = [dict.fromkeys(PHASES, 0.0) for _ in range(count)]
        calls: list[list[CollectiveCall]] = [[] for _ in range(count)]
        for index, (part, what, operation) in enumerate(self.parts):
            if isinstance(what, float):
                for rank in range(count):
                    ms = what * (1.0 + self.noise * abs(self.random.gauss(0.0, 1.0))) + late.get((rank, index), 0.0)
                    own[rank][part] += ms
                    self.clocks[rank] += ms
                continue
            for members in self.groups[what]:
                end = max(self.clocks[rank] for rank in members) + self.wire_ms
                for rank in members:
                    wait = end - self.clocks[rank]
                    start = self.clocks[rank] - begins[rank]
                    calls[rank].append(CollectiveCall(what, operation, 1000, start, wait, wait))
                    self.clocks[rank] = end
        for rank in range(count):
            self.pending[rank].append(self._event(rank, begins[rank], own[rank], calls[rank]))
        if self.step % self.covered == 0:
            for rank, events in enumerate(self.pending):
                self.state.apply(_merged(events))
                self.pending[rank] = []

    def _event(self, rank: int, begin: float, own: Mapping[str, float], calls: list[CollectiveCall]) -> Step:
        groups = []
        for name in dict.fromkeys(call.group for call in calls):
            of = [call for call in calls if call.group == name]
            exposed = sum(call.exposed_ms for call in of)
            operations = {each: float(sum(c.operation == each for c in of)) for each in {c.operation for c in of}}
            sync = GroupSync(group=name, calls=float(len(of)), bytes=1000.0 * len(of), exposed_ms=exposed)
            sync.operations = operations
            groups.append(sync)
        return Step(
            time=1.0 + self.clocks[rank] / 1e3,
            rank=rank,
            step=self.step,
            epoch=1,
            steps=1,
            samples=8,
            loss=2.0,
            step_ms=self.clocks[rank] - begin,
            sync_exposed_ms=sum(call.exposed_ms for call in calls),
            groups=groups or None,
            calls=calls if self.step % 32 == 0 else None,
            **{f"{phase}_ms": ms for phase, ms in own.items() if self.phases},
        )


def _merged(events: Sequence[Step]) -> Step:
    """Return one event of several, with means."""
    last, count = events[-1], len(events)
    if count == 1:
        return last
    names = ("step_ms", "sync_exposed_ms", *(f"{phase}_ms" for phase in PHASES))
    means = {name: sum(getattr(event, name) for event in events) / count for name in names}
    groups = []
    for index, sync in enumerate(last.groups or ()):
        waits = [event.groups[index].exposed_ms or 0.0 for event in events if event.groups]
        mean = GroupSync(group=sync.group, calls=sync.calls, exposed_ms=sum(waits) / count)
        mean.operations = sync.operations
        groups.append(mean)
    each = {f"{name}_each": [getattr(event, name) for event in events] for name in ("step_ms", "sync_exposed_ms")}
    return Step(
        time=last.time, rank=last.rank, step=last.step, epoch=1, steps=count, samples=8 * count, loss=2.0,
        groups=groups, **means, **each,
    )  # fmt: skip


def kinds(found: Sequence[Finding]) -> list[tuple[str, str, int | None, str | None]]:
    return [(finding.kind, finding.state, finding.rank, finding.cause) for finding in found]


@pytest.mark.parametrize("noise", [0.05, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("parts", "groups"), [(FSDP, WORLD), (TENSOR_PARALLEL, MESH_2X2)], ids=["FSDP", "tensor and data parallel"]
)
def test_a_thousand_even_steps_have_no_straggler(
    parts: list[Part], groups: dict[str, list[list[int]]], noise: float
) -> None:
    run = ParallelRun(parts, groups, noise=noise)
    assert kinds(run.steps(1000)) == []


@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in range(3)), 3])
@pytest.mark.parametrize("part", ["data", "forward", "backward", pytest.param("optimizer", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("parts", "groups"), [(FSDP, WORLD), (TENSOR_PARALLEL, MESH_2X2)], ids=["FSDP", "tensor and data parallel"]
)
def test_a_late_rank_is_named_with_its_phase_within_twenty_steps(
    parts: list[Part], groups: dict[str, list[list[int]]], part: str, rank: int
) -> None:
    """In a mesh two ranks wait for it, and another one for one of these: nobody else is late."""
    run = ParallelRun(parts, groups)
    assert run.steps(60) == []
    index = next(index for index, (name, _, _) in enumerate(parts) if name == part)
    found = run.steps(20, {(rank, index): 200.0})
    assert kinds(found) == [("straggler", "raised", rank, part)]
    assert found[0].evidence["excess_ms"] == pytest.approx(200.0, rel=0.1)
    assert found[0].evidence["late_ms"] == pytest.approx(200.0, rel=0.1)
    late = run.state.lateness()
    assert max(late, key=late.__getitem__) == rank
    assert max(late[other] for other in late if other != rank) < 20.0
    assert kinds(run.steps(60)) == [("straggler", "cleared", rank, part)]


def late_in(parts: Sequence[Part], rank: int, part: str, ms: float = 200.0) -> dict[tuple[int, int], float]:
    """Return that a rank is late in the first such part of each step."""
    return {(rank, next(index for index, (name, _, _) in enumerate(parts) if name == part)): ms}


def test_the_ranks_that_wait_are_named_with_their_group() -> None:
    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2)
    run.steps(60)
    (found,) = run.steps(20, late_in(TENSOR_PARALLEL, 3, "forward"))
    assert found.message.endswith("because of its forward pass; rank 2 of tp and rank 1 of dp wait for it")
    assert found.evidence["waiting"] == 2.0

    world = ParallelRun(FSDP, WORLD)
    world.steps(60)
    (found,) = world.steps(20, late_in(FSDP, 3, "forward"))
    assert found.message.endswith("because of its forward pass"), "all others wait, as ever"


def test_in_groups_that_never_meet_only_the_late_ones_wait() -> None:
    parts: list[Part] = [("forward", 20.0, ""), ("backward", 40.0, ""), ("sync", "pair", "all_reduce")]
    run = ParallelRun(parts, {"pair": [[0, 1], [2, 3]]})
    assert run.steps(60) == []
    (found,) = run.steps(20, late_in(parts, 2, "backward"))
    assert kinds([found]) == [("straggler", "raised", 2, "backward")]
    assert found.message.endswith("; rank 3 of pair waits for it")
    late = run.state.lateness()
    assert late[2] > 50.0
    assert max(late[0], late[1]) < 20.0, "they wait for nobody, and nobody for them"


def test_work_is_uneven_among_ranks_that_wait_for_each_other() -> None:
    """Ranks 2 and 3 are late in turn; the other two, that are never late, do not wait for them."""
    parts: list[Part] = [("forward", 20.0, ""), ("backward", 40.0, ""), ("sync", "pair", "all_reduce")]
    run = ParallelRun(parts, {"pair": [[0, 1], [2, 3]]})
    found = [each for turn in range(400) for each in run.steps(1, {(2 + run.random.randrange(2), 1): 40.0})]
    assert kinds(found) == [("imbalance", "raised", None, "unattributed")]
    assert found[0].message.startswith("ranks 2, 3 are late in turn, ")


def test_in_a_pipeline_the_stage_that_the_others_wait_for_is_named() -> None:
    """Rank r gets its input from r - 1: the last one waits for the third, which waits for the second."""
    links = {f"link {rank}": [[rank, rank + 1]] for rank in range(3)}
    forward = [("forward", 10.0, "")]
    parts: list[Part] = [
        *forward,
        *[("sync", f"link {rank}", "broadcast") for rank in range(3)],
        ("backward", 20.0, ""),
    ]
    run = ParallelRun(parts, links)
    assert run.steps(60) == []
    found = run.steps(20, late_in(parts, 1, "forward"))
    assert kinds(found) == [("straggler", "raised", 1, "forward")]
    assert "rank 0 of link 0 and rank 2 of link 1 wait for it" in found[0].message


@pytest.mark.parametrize(("operation", "kinds_found"), [("send", set()), ("broadcast", {"communication_bound"})])
def test_waiting_for_single_ranks_is_no_transfer(operation: str, kinds_found: set[str]) -> None:
    """Each of two stages idles while the other one works: a pipeline's bubble."""
    parts: list[Part] = [("forward", 5.0, ""), ("sync", "stages", operation), ("backward", 5.0, "")]
    run = ParallelRun(parts, {"stages": [[0, 1]]}, ranks=2, wire_ms=20.0, covered=4)
    assert {finding.kind for finding in run.steps(320)} == kinds_found


def test_a_late_rank_is_named_where_only_steps_and_collectives_are_measured() -> None:
    run = ParallelRun(FSDP, WORLD, phases=False)
    assert run.steps(60) == []
    found = run.steps(40, late_in(FSDP, 2, "backward"))
    assert kinds(found) == [("straggler", "raised", 2, "unattributed")]
    assert "outside the measured phases" in found[0].message


@pytest.mark.parametrize("covered", [1, 4])
def test_bare_transfers_in_groups_bind_a_run_and_waits_for_a_late_rank_do_not(covered: int) -> None:
    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2, covered=covered)
    run.steps(320)
    late = [each for each in run.steps(160, late_in(TENSOR_PARALLEL, 3, "forward")) if each.state == "raised"]
    assert kinds(late) == [("straggler", "raised", 3, "forward")]

    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2, wire_ms=20.0, covered=covered)
    (found,) = run.steps(320)
    assert kinds([found]) == [("communication_bound", "raised", None, "communication")]
    assert found.evidence["wire_exposed_ms"] == pytest.approx(80.0, rel=0.05), "four collectives a step"
    assert found.message.startswith("communication that computing does not hide")
    assert "even the last rank waits that long, longest in tp (at most" in found.message
    assert "fully_shard" in found.advice


def test_ranks_that_are_last_in_turn_within_a_step_are_not_bound_by_communication() -> None:
    """Each rank is 40 ms late in one layer: all wait for 120 ms, and no transfer takes long."""
    run = ParallelRun(FSDP, WORLD)
    turns = {(rank, 2 + 2 * rank): 40.0 for rank in range(4)}
    found = run.steps(200, turns)
    assert {finding.kind for finding in found} <= {"straggler"}


# --- stalls ---------------------------------------------------------------------------------------------------------


def test_only_the_rank_that_works_is_stalled_and_not_those_that_wait_for_it_or_for_them() -> None:
    """Ranks 0 and 1 are further: they wait at the end of the step."""
    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2)
    run.steps(40)
    waits_in = {0: "reduce_scatter of dp", 1: "reduce_scatter of dp", 2: "all_reduce of tp", 3: ""}
    (found,) = run.stand_still(12.0, waits_in, rank0=4, rank1=4)
    assert (found.kind, found.rank, found.cause) == ("stalled", 3, "forward")
    assert "rank 3 is in its forward pass" in found.message
    assert found.message.endswith("; rank 1 waits in reduce_scatter of dp; rank 2 waits in all_reduce of tp")


def test_a_rank_that_waits_within_the_step_before_is_not_stalled_either() -> None:
    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2)
    run.steps(40)
    for rank in (0, 1):
        run.state.apply(Step(time=3.0, rank=rank, step=41, epoch=1, steps=1, samples=8, step_ms=60.0))
    (found,) = run.stand_still(12.0, {2: "all_reduce of tp", 3: ""})
    assert (found.kind, found.rank) == ("stalled", 3)


def test_ranks_that_train_on_in_another_group_hide_no_stall() -> None:
    parts: list[Part] = [("forward", 20.0, ""), ("backward", 40.0, ""), ("sync", "pair", "all_reduce")]
    run = ParallelRun(parts, {"pair": [[0, 1], [2, 3]]})
    run.steps(40)
    run.stand_still(0.0, {2: "", 3: "all_reduce of pair"})
    found = []
    for second in range(1, 16):
        for rank in (0, 1):
            now = 1.0 + max(run.clocks) / 1e3 + second
            run.state.apply(Step(time=now, rank=rank, step=40 + second, epoch=1, steps=1, samples=8, step_ms=60.0))
        found += run.diagnosis.update(run.state, now)
    assert [(each.kind, each.rank) for each in found if each.kind == "stalled"] == [("stalled", 2)]


def test_a_rank_that_waits_in_another_collective_than_its_group_is_named() -> None:
    run = ParallelRun(FSDP, WORLD)
    run.steps(40)
    reduce = "all_reduce of world"
    (found,) = run.stand_still(25.0, {0: reduce, 1: reduce, 2: "all_gather of world", 3: reduce})
    assert (found.kind, found.rank, found.cause, found.severity) == ("stalled", 2, "collectives", "critical")
    assert found.message.endswith("; rank 2 waits in all_gather of world, ranks 0, 1, 3 wait in all_reduce of world")
    assert "same collectives in the same order" in found.advice


def test_two_groups_of_one_name_may_wait_in_unlike_collectives() -> None:
    run = ParallelRun(TENSOR_PARALLEL, MESH_2X2)
    run.steps(40)
    reduce, gather = "all_reduce of tp", "all_gather of tp"
    (found,) = run.stand_still(25.0, {0: reduce, 1: reduce, 2: gather, 3: gather})
    assert (found.kind, found.rank, found.cause) == ("stalled", None, "sync")


def test_torch_s_own_record_shows_unequal_sizes_later() -> None:
    run = ParallelRun(FSDP, WORLD)
    run.steps(40)
    reduce = dict.fromkeys(range(4), "all_reduce of world")
    (found,) = run.stand_still(25.0, reduce)
    assert (found.rank, found.cause) == (None, "sync")
    for rank in range(4):
        last = [Collective("all_reduce", 7, "complete", [[4]], "default_pg")]
        last.append(Collective("all_reduce", 8, "scheduled", [[5 if rank == 1 else 4]], "default_pg"))
        run.state.apply(RankStacks(time=1.0, rank=rank, request="a", collectives=last))
    found = run.diagnosis.update(run.state, 40.0)
    assert kinds(found) == [("stalled", "cleared", None, "sync"), ("stalled", "raised", 1, "collectives")]
    assert found[1].message.endswith(
        "; rank 1 has called all_reduce 8 of [5], ranks 0, 2, 3 have called all_reduce 8 of [4]"
    )


# --- roll-up --------------------------------------------------------------------------------------------------------


def test_a_lateness_of_all_ranks_of_a_group_is_told_once() -> None:
    """All of one tensor-parallel group are slow: two findings in the record, one in views."""
    run = ParallelRun(TENSOR_PARALLEL, {"tp": [[0, 1], [2, 3], [4, 5]], "dp": [[0, 2, 4], [1, 3, 5]]}, ranks=6)
    run.steps(60)
    both = late_in(TENSOR_PARALLEL, 2, "backward", 50.0) | late_in(TENSOR_PARALLEL, 3, "backward", 60.0)
    found = run.steps(20, both)
    assert sorted(kinds(found)) == [("straggler", "raised", rank, "backward") for rank in (2, 3)]
    (merged,) = roll_up(found, run.state.ranks)
    assert (merged.rank, merged.ranks, merged.evidence["ranks"]) == (3, [2, 3], 2.0)
    assert merged.message.startswith("ranks 2, 3 (tp) take ")
    assert merged.message.endswith("because of their backward pass")
    assert finding_summary(merged).startswith("ranks 2, 3 slow +")
    assert roll_up(found[:1], run.state.ranks) == found[:1]
