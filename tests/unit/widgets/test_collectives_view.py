from __future__ import annotations

import pytest

from gputrain_tui.console.widgets.collectives_view import collective_rows
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import group_figures
from trainer.contract.record import CollectiveCall, CollectiveGroup, GroupSync, RankState, Step


def step(number: int, *groups: GroupSync, **values: object) -> Step:
    waits = sum(each.exposed_ms or 0.0 for each in groups)
    return Step(
        time=float(number), rank=0, step=number, epoch=1, steps=1, samples=8,
        groups=list(groups) or None, **{"step_ms": 100.0, "sync_exposed_ms": waits, **values},
    )  # fmt: skip


def tp(exposed_ms: float, calls: float = 4.0) -> GroupSync:
    return GroupSync(group="tp", calls=calls, bytes=4096.0, exposed_ms=exposed_ms, operations={"all_reduce": calls})


def test_the_groups_of_a_rank_are_means_over_its_last_steps_and_add_up_to_its_wait() -> None:
    state = RunState(world_size=4)
    state.apply(CollectiveGroup(time=1.0, rank=0, name="tp", ranks=[0, 1]))
    reduced = {"sync_buckets": 2, "sync_bytes": 5096}
    state.apply(step(1, tp(30.0), sync_exposed_ms=50.0, **reduced))
    state.apply(step(2, tp(10.0, 2.0), sync_exposed_ms=50.0, **reduced))
    first, second = group_figures(state.ranks[0])
    assert (first.group, first.exposed_ms, first.share, first.calls) == ("DDP", 30.0, pytest.approx(0.3), 2.0)
    assert (second.group, second.ranks, second.exposed_ms, second.calls) == ("tp", (0, 1), 20.0, 3.0)
    assert (second.operations, second.share) == ({"all_reduce": 3.0}, pytest.approx(0.2))
    assert (first.exposed_ms or 0.0) + (second.exposed_ms or 0.0) == state.ranks[0].sums.mean_exposed_ms


def test_a_rank_started_anew_has_no_groups_of_its_last_start() -> None:
    state = RunState(world_size=2)
    state.apply(RankState(time=0.5, rank=0, state="spawned", pid=7))
    state.apply(CollectiveGroup(time=1.0, rank=0, name="tp", ranks=[0, 1]))
    state.apply(step(1, tp(30.0)))
    state.apply(RankState(time=9.0, rank=0, state="spawned", pid=8))
    assert group_figures(state.ranks[0]) == []
    assert state.ranks[0].groups.by_name == {}


def test_the_table_has_a_line_for_each_group_and_each_call() -> None:
    state = RunState(world_size=8)
    state.apply(CollectiveGroup(time=1.0, rank=0, name="dp_shard", ranks=[*range(8)]))
    state.apply(CollectiveGroup(time=1.0, rank=0, name="tp", ranks=[0, 1]))
    shard = GroupSync(group="dp_shard", calls=1.0, bytes=10.0, operations={"all_gather": 1.0})
    calls = [CollectiveCall("tp", "all_reduce", 1024, 3.0, 8.0, 7.5)]
    state.apply(step(32, tp(30.0), shard, calls=calls))
    state.apply(step(33, tp(30.0), shard))
    lines = ["".join(text for text, _ in row) for row in collective_rows(state.ranks[0])]
    assert lines == [
        " group     ranks              calls     bytes   wait ms     share  operations",
        " tp        0, 1               4.000     4 KiB     30.00     30.0%  all_reduce 4",
        " dp_shard  8 ranks            1.000      10 B         –         –  all_gather 1",
        "",
        " calls of step 32 100.0 ms",
        "     at ms   took ms   wait ms     bytes",
        "     3.000     8.000     7.500     1 KiB  all_reduce of tp",
    ]
    assert max(map(len, lines)) <= 80


def test_the_calls_of_a_slow_step_stay_in_view_for_a_thousand_steps() -> None:
    state = RunState(world_size=2)
    calls = [CollectiveCall("tp", "all_reduce", 1024, 3.0, 8.0, 7.5)]

    def titles() -> list[str]:
        rows = collective_rows(state.ranks[0])
        return [text for row in rows for text, role in row if role == "title" or "slowest" in text]

    for number in (32, 40, 64, 96, 128, 160, 192):
        state.apply(step(number, tp(30.0), calls=calls, step_ms=310.0 if number == 40 else 100.0))
    slowest = " 310.0 ms, the slowest recorded of the last 1,000"
    assert titles() == [" calls of step 40", slowest, " calls of step 192"]
    state.apply(step(1041, tp(30.0), calls=calls))
    assert titles() == [" calls of step 1,041"]
