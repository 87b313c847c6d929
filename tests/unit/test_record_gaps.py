"""Gaps of a rank's record: what the rank tells, what is said of it, and that its steps are counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import plan_for

from gputrain_tui.history.record_tail import newest_loss_of
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.lifecycle.record_gap_watch import RecordGaps
from gputrain_tui.state import RunState
from gputrain_tui.state.record_gaps import gap_finding, is_news
from trainer.contract.record import Finding, RunDir, RunEnded, Step, encode_event
from trainer.contract.record.unrecorded import FILE_BYTES, UnrecordedSteps, read_unrecorded

FULL, QUOTA = "No space left on device", "Disk quota exceeded"


def step(number: int, steps: int = 1, **values: Any) -> Step:
    values = {"rank": 1, "time": float(number), "samples": 8 * steps} | values
    return Step(step=number, steps=steps, epoch=1, **values)


def told(message: str = FULL, *, state: str = "raised", since: int = 79, done: int = 300, **values: Any) -> Finding:
    lacks = done - since if state == "raised" else 0
    evidence = {"began": 80.0, "step": done, "steps": lacks, "samples": 8 * lacks, "tokens": 0}
    values = {"time": float(done), "rank": 1} | values
    return Finding(kind="record_incomplete", state=state, step=since, message=message, evidence=evidence, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gap", "host", "text"),
    [
        (told(), "h2", "h2's record ends at step 79: its disk is full"),
        (told(QUOTA), "h2", "h2's record ends at step 79: its disk is full"),
        (told(), "", "the record ends at step 79: the disk of the run directory is full"),
        (told("File too large"), "", "the record ends at step 79: File too large"),
        (told(""), "h2", "h2's record is written again, but lacks 221 steps after step 79"),
        (
            told("", state="cleared"),
            "h2",
            "h2's record is written again and lacks no step, after it had ended at step 79",
        ),
    ],
)
def test_a_gap_says_whose_record_ends_where_and_why(gap: Finding, host: str, text: str) -> None:
    assert gap_finding(gap, host).message == text


def test_of_the_ranks_on_one_disk_one_says_so() -> None:
    first = gap_finding(told(), "h2")
    second = gap_finding(told(since=81), "h2", first)
    assert (first.severity, second.severity, second.message) == ("warning", "info", first.message)


@pytest.mark.parametrize(
    ("before", "gap", "is_last", "news"),
    [
        (None, told(), False, True),
        (told(), told(), False, False),
        (told(done=100), told(done=101), False, False),
        (told(done=100), told(done=101), True, True),
        (told(done=100), told(done=110), False, True),
        (told(), told("", state="cleared"), False, True),
        (told(), told(QUOTA), False, True),
    ],
)
def test_a_gap_is_recorded_again_when_it_has_grown_by_a_tenth(
    before: Finding | None, gap: Finding, is_last: bool, news: bool
) -> None:
    assert is_news(gap, before, is_last=is_last) == news


def of_two_ranks(*gaps: Finding, recorded: int = 79) -> RunState:
    state = RunState(world_size=2)
    state.apply_all([step(300, 300, rank=0), step(recorded, recorded), *gaps])
    return state


def counts(state: RunState) -> tuple[int, int, bool]:
    return state.step, sum(view.totals.samples for view in state.ranks.values()), state.counts_all_steps


def test_steps_that_the_record_lacks_are_counted_once() -> None:
    assert counts(of_two_ranks()) == (79, 8 * 379, False)
    half, whole = gap_finding(told(done=150), "h2"), gap_finding(told(), "h2")
    assert counts(of_two_ranks(half)) == (150, 8 * 450, False), "the others have done more"
    for gaps in ([whole], [half, whole], [half, whole, whole]):
        assert counts(of_two_ranks(*gaps)) == (300, 8 * 600, True)
    over = gap_finding(told("", state="cleared"), "h2")
    state = of_two_ranks(half, over)
    state.apply(step(300, 221))
    assert counts(state) == (300, 8 * 600, True)
    assert state.record_gap == ""


@pytest.mark.parametrize(
    ("gap", "newest"),
    [
        (None, (79, 2.0)),
        (told(done=150), (150, None)),
        (told(done=400), (300, None)),
        (told("", state="cleared"), (79, 2.0)),
        (told("", done=150), (79, 2.0)),
        (told(done=150, time=70.0), (79, 2.0)),
    ],
    ids=[
        "whole",
        "full",
        "all done by the other",
        "written again",
        "written again with a gap",
        "of an earlier attempt",
    ],
)
def test_a_list_of_runs_counts_the_steps_that_a_rank_whose_disk_is_full_tells(
    tmp_path: Path, gap: Finding | None, newest: tuple[int, float | None]
) -> None:
    run = RunDir(tmp_path)
    for folder in (run.events, run.gaps):
        folder.mkdir()
    for rank, done in enumerate((300, 79)):
        run.rank_events(rank).write_bytes(encode_event(step(done, done, rank=rank, loss=2.0)))
    if gap is not None:
        (run.gaps / "1.json").write_bytes(encode_event(gap).ljust(FILE_BYTES))
    assert newest_loss_of(run, 2) == newest


def test_the_end_does_not_say_again_what_a_gap_says() -> None:
    state = of_two_ranks(gap_finding(told(), "h2"))
    message = f"the end of the record is missing: {state.record_gap}"
    state.apply(RunEnded(time=301.0, status="finished", exit_code=0, message=message))
    assert state.record_gap == "h2's record ends at step 79: its disk is full"


def test_a_rank_tells_the_steps_that_wait_and_those_that_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "gaps" / "1.json"
    gap = UnrecordedSteps(path, 1)
    lines = [encode_event(step(number)) for number in range(1, 6)]

    def evidence() -> tuple[str, int | None, float, float]:
        gap.tell(at_once=True)
        assert path.stat().st_size == FILE_BYTES, "it needs no more space than was reserved"
        found = read_unrecorded(path)
        assert found is not None
        return found.state, found.step, found.evidence["step"], found.evidence["samples"]

    gap.add(step(1), dropped=False)
    gap.note_write(lines[:1], [], "")
    gap.tell(at_once=True)
    assert read_unrecorded(path) is None, "all is written"
    gap.note_write([], lines[1:3], FULL)
    assert evidence() == ("raised", 1, 3, 16)
    gap.add(step(4), dropped=False)
    gap.add(step(5), dropped=True)
    assert evidence() == ("raised", 1, 5, 32)
    gap.note_write(lines[1:2], lines[2:4], FULL)
    assert evidence() == ("raised", 1, 5, 24)
    gap.note_write(lines[2:4], [], "")
    assert evidence() == ("raised", 1, 5, 8)
    gap.note_write([], [encode_event(step(6))], FULL)
    gap.note_write([encode_event(step(6))], [], "")
    assert evidence() == ("raised", 5, 6, 8), "what was dropped is never written"


def test_a_gap_without_dropped_steps_is_over_once_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "gaps" / "1.json"
    gap = UnrecordedSteps(path, 1)
    gap.note_write([], [encode_event(step(2))], FULL)
    gap.note_write([encode_event(step(2))[5:]], [], "")  # the rest of a line
    gap.tell(at_once=True)
    found = read_unrecorded(path)
    assert found is not None
    assert (found.state, found.evidence["steps"]) == ("cleared", 0)


class NodeOfHost(NodeProcess):
    """The process of a node as its host answers, and nothing else."""

    def __init__(self, node: int, host: str, unwritable: str = "") -> None:
        super().__init__(node, host, None)
        self.unwritable = unwritable

    def fileno(self) -> int:
        raise NotImplementedError

    poll = stop = kill = close = fileno  # type: ignore[assignment]


def test_a_read_only_disk_is_over_with_its_attempt_and_no_other_host_is_named(tmp_path: Path) -> None:
    nodes = ['host = "h1"\ncpu_ranks = 1', 'host = "h2"\ncpu_ranks = 1']
    gaps = RecordGaps(RunDir(tmp_path), plan_for(*nodes))
    first, error = NodeOfHost(0, "h1"), "Read-only file system"
    (raised,) = gaps.check_hosts([first, NodeOfHost(1, "h2", error)])
    gaps.change_plan(plan_for(nodes[0], nodes[1].replace("h2", "h3")))
    (over,) = gaps.begin_attempt()
    assert (over.state, over.host, over.rank) == ("cleared", "h2", 1)
    assert over.message == f"{raised.message}, until its attempt ended"
    assert gaps.check_hosts([first, NodeOfHost(1, "h3")]) == gaps.standing() == []
    (anew,) = gaps.check_hosts([first, NodeOfHost(1, "h3", error)])
    assert (anew.state, anew.message) == ("raised", f"h3's record ends at step 0: {error}")
