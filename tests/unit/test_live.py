from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import synthetic
from manual_clock import ManualClock

from gputrain_tui.history.status_file import elapsed_of, write_status
from gputrain_tui.hosts.host_names import PENDING_HOST
from gputrain_tui.lifecycle.live_run import LiveRun
from trainer.contract.record import AnyEvent, RunStatusName, Step
from trainer.host.process_identity import identify


class Portions:
    """A source that gives what a test put there, one portion at a time."""

    def __init__(self, *portions: list[AnyEvent]) -> None:
        self.portions = list(portions)
        self.polls = 0

    @property
    def backlog_bytes(self) -> int:
        return 100 * len(self.portions)

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        self.polls += 1
        return self.portions.pop(0) if self.portions else []

    def close(self) -> None:
        self.portions.clear()


def steps(first: int, last: int) -> list[AnyEvent]:
    return [Step(time=float(n), rank=0, step=n, epoch=1, steps=1, samples=1, loss=1.0) for n in range(first, last)]


def test_one_poll_shows_the_whole_history_of_a_run(tmp_path: Path) -> None:
    live = LiveRun(synthetic.run(tmp_path, steps=120, status="finished"))
    assert not live.poll(budget_s=60)
    assert live.caught_up
    assert live.status == "finished"
    assert live.state.step == 120
    assert (live.series.first_step, live.series.last_step) == (1, 120)
    live.close()


def test_appended_events_are_applied_and_move_the_version(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=3)
    live = LiveRun(run)
    live.poll()
    version = live.version
    live.poll()
    assert live.version == version
    for rank in (0, 1):
        synthetic.write(run.dir.rank_events(rank), *(event for event in steps(4, 5)))
    live.poll()
    assert live.version > version
    assert live.state.rank(0).step == 4
    live.close()


def test_a_poll_keeps_its_budget_and_reports_a_backlog(tmp_path: Path) -> None:
    source = Portions(steps(1, 10), steps(10, 20), steps(20, 30), steps(30, 40))
    live = LiveRun(synthetic.run(tmp_path, steps=0), source=source, clock=ManualClock(100.0, tick=0.015))
    assert live.poll(0.02)
    assert live.state.rank(0).step == 19
    version = live.version
    assert not live.poll(0.02)
    assert live.version > version
    assert live.state.rank(0).step == 39
    assert live.caught_up


def test_the_read_share_is_reported_until_all_is_read(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=200)
    size = sum(path.stat().st_size for path in run.dir.events.iterdir())

    class Halves(Portions):
        @property
        def backlog_bytes(self) -> int:
            return size // 2 * len(self.portions)

    live = LiveRun(run, source=Halves([], [], []), clock=ManualClock(100.0, tick=1.0))
    assert live.reading is None
    live.poll()
    assert live.reading == pytest.approx(0.0, abs=0.01)
    live.poll()
    assert live.reading == pytest.approx(0.5, abs=0.01)
    live.poll()
    assert live.reading is None
    assert live.caught_up


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_an_end_is_known_before_the_record_is_read(tmp_path: Path, status: RunStatusName) -> None:
    run = synthetic.run(tmp_path, steps=2000, status=status, failed_rank=1 if status == "failed" else None)
    live = LiveRun(run, clock=ManualClock(100.0, tick=1.0))
    assert live.poll()
    assert live.state.ended is None
    assert (live.status, live.over, live.end_text) == (status, True, "ended")
    assert live.elapsed_s == elapsed_of(run.status, 0)
    assert live.record_gap == "", "a line that is not read whole yet is not damaged"
    while live.poll():
        assert live.status == status
    assert (live.status, live.record_gap) == (status, "")
    live.close()


def test_a_run_whose_supervisor_was_killed_is_lost(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=5)
    run.status.supervisor = identify(os.getpid())
    write_status(run.dir, run.status)
    clock = ManualClock(100.0)
    live = LiveRun(run, clock=clock)
    live.poll()
    assert live.status == "running"
    run.status.supervisor = type(run.status.supervisor)(
        pid=os.getpid(), start_ticks=1, boot_id=run.status.supervisor.boot_id, host=run.status.supervisor.host
    )
    write_status(run.dir, run.status)
    clock.seconds += 60
    live.poll()
    assert live.status == "lost"
    live.close()


@pytest.mark.parametrize("status", ["running", "finished"])
def test_a_run_whose_directory_is_gone_is_deleted(tmp_path: Path, status: RunStatusName) -> None:
    run = synthetic.run(tmp_path, steps=5, status=status)
    clock = ManualClock(100.0)
    live = LiveRun(run, clock=clock)
    live.poll()
    before, aside = live.version, tmp_path / "aside"
    run.dir.path.rename(aside)
    clock.seconds += 60
    live.poll()
    assert (live.status, live.over, live.can_resume) == ("deleted", True, False)
    assert live.version > before
    assert live.state.step == 5
    aside.rename(run.dir.path)  # as after an error of a network file system
    clock.seconds += 60
    live.poll()
    assert live.status == status
    live.close()


def test_hosts_of_ranks_come_from_the_plan_before_their_first_event(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, nodes=2, ranks_per_node=4, steps=0)
    live = LiveRun(run)
    assert live.state.rank(5).host == "node001"
    assert live.state.rank(5).local_rank == 1
    plan = json.loads(run.dir.plan.read_bytes())
    plan["nodes"][1]["host"] = PENDING_HOST.format(1)
    run.dir.plan.write_text(json.dumps(plan))
    assert [LiveRun(run).state.rank(rank).host for rank in (0, 5)] == ["node000", None], "Slurm has not chosen it yet"


def test_elapsed_time_stops_with_the_run(tmp_path: Path) -> None:
    running = LiveRun(synthetic.run(tmp_path, steps=10), now=lambda: synthetic.BEGIN + 50)
    running.poll()
    assert running.elapsed_s == 50
    over = LiveRun(synthetic.run(tmp_path, name="over", steps=10, status="stopped"), now=lambda: synthetic.BEGIN + 50)
    over.poll()
    assert over.elapsed_s == pytest.approx(7.0)
    running.close()
    over.close()


def test_a_record_that_is_longer_than_a_poll_is_read_through_while_it_grows(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, nodes=2, ranks_per_node=2, steps=2000, straggler=1)
    live = LiveRun(run, clock=ManualClock(100.0, tick=1.0))
    assert live.poll()
    assert live.state.step is not None
    assert live.state.step < 2000
    for rank in range(4):
        event = synthetic.step_of(rank, 2001, random.Random(rank))
        synthetic.write(run.dir.rank_events(rank), event)
    shares = []
    while live.poll():
        assert live.reading is not None
        shares.append(live.reading)
    assert shares == sorted(shares)
    assert live.reading is None
    assert live.state.rank(2).totals.samples == 2001 * 16
    assert (live.series.first_step, live.series.last_step) == (1, 2001)
    assert len(live.state.past_findings) == 3
    live.close()
