from __future__ import annotations

import pytest

from gputrain_tui.diagnosis.missing import lost_peer
from gputrain_tui.state import RunState
from trainer.contract.record import AnyEvent, Failure, Finding, RankState, Step


def step(rank: int, number: int) -> Step:
    return Step(time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=4)


def lost(rank: int, time: float = 50.0) -> list[AnyEvent]:
    failure = Failure(time=time, kind="lost_peer", rank=rank, message="Timed out waiting 9000ms for recv operation")
    return [RankState(time=time, rank=rank, state="failed"), failure]


def entered(rank: int, state: str, time: float) -> RankState:
    return RankState(time=time, rank=rank, state=state, host=f"h{rank}")  # type: ignore[arg-type]


STALL = Finding(time=40.0, kind="stalled", rank=1, step=5, severity="critical", message="rank 1 hangs")
LEFT = Finding(time=40.0, kind="stalled", rank=1, step=5, severity="critical", cause="left", message="rank 1 has ended")


@pytest.mark.parametrize(
    ("events", "kind", "rank", "message"),
    [
        ([STALL, *lost(0), *lost(2, 49.0)], "stalled", 1, "rank 1 hangs; rank 2 gave up: Timed out waiting 9000ms"),
        ([STALL, entered(2, "finished", 30.0), *lost(0)], "stalled", 1, "rank 1 hangs; rank 0 gave up"),
        ([LEFT, entered(1, "finished", 30.0), *lost(0)], "left_early", 1, "rank 1 has ended; rank 0 gave up"),
        (
            [entered(1, "finished", 30.0), *lost(0)],
            "left_early",
            1,
            "rank 1 had exited with code 0 after step 5 while others were still training; rank 0 gave up",
        ),
        ([*lost(0), entered(1, "finished", 50.5), *lost(2)], None, None, ""),
        ([*lost(0), *lost(2, 50.5)], "silent", 1, "rank 1 reported nothing after step 5; rank 0 gave up"),
        ([*lost(0)], "silent", 1, "rank 1 reported nothing after step 5; rank 0 gave up"),
        ([*lost(0), *lost(1), *lost(2)], None, None, ""),
        ([STALL], None, None, ""),
    ],
    ids=[
        "stalled",
        "stalled before one that left",
        "found to have left",
        "left",
        "finished after it",
        "silent",
        "silent and behind",
        "all",
        "no failure",
    ],
)
def test_the_stalled_rank_is_the_one_that_others_lost_else_one_that_left_else_a_silent_one(
    events: list[AnyEvent], kind: str | None, rank: int | None, message: str
) -> None:
    state = RunState(world_size=3)
    state.apply_all(entered(each, "training", 0.0) for each in range(3))
    state.apply_all([step(0, 6), step(1, 5), step(2, 6)])
    state.apply_all(events)
    found = lost_peer(state)
    if kind is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.rank, found.host, found.step) == (kind, rank, "h1", 5)
    assert found.message.startswith(message)
    state.apply(found)
    assert state.root_cause == found
    assert state.ranks[0].outcome == "lost peer"
