from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from made_runs import NOON, append_events, make_run, step

from gputrain_tui.history.status_file import Status, elapsed_of, read_status
from gputrain_tui.history.summary import summarize
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.run_end import recorded_exit_code
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state.elapsed import Pace
from trainer.contract.record import RunEnded, decode_events, encode_event
from trainer.host.boot import BootMoment

PLAN = Plan(world_size=1, init_method=None, backend="gloo", launcher="local", nodes=[])


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0], ids=["set forward", "set back"])
def test_a_clock_that_is_set_changes_no_duration(jump_s: float, tmp_path: Path) -> None:
    now = [NOON]
    run = make_run(tmp_path, started=NOON)
    RunStatusWriter(run.dir, PLAN, now=lambda: now[0]).started()
    now[0] += jump_s
    adopter = RunStatusWriter(run.dir, PLAN, now=lambda: now[0])  # another process on this machine
    adopter.close(AttemptResult(status="finished"), left=[])
    assert adopter.status.elapsed_s is not None
    assert 0 <= adopter.status.elapsed_s < 600
    *_, ended = decode_events(run.dir.run_events.read_bytes())
    assert isinstance(ended, RunEnded)
    assert ended.elapsed_ms == pytest.approx(1e3 * adopter.status.elapsed_s)
    assert summarize(make_run(tmp_path, **msgspec.structs.asdict(adopter.status)), now=0.0)["duration_s"] < 600


def test_without_a_measured_duration_the_wall_clock_counts_and_never_below_zero() -> None:
    status = Status(run="r", recipe="r", world_size=1, started=NOON)
    assert elapsed_of(status, NOON + 9) == 9
    assert elapsed_of(status, NOON - 9) == 0
    status.started_after_boot = BootMoment(boot_id="another boot", uptime_s=5.0)
    assert elapsed_of(status, NOON + 9) == 9
    status.ended = NOON + 4
    assert elapsed_of(status, NOON + 9) == 4


def test_an_end_that_its_supervisor_has_recorded_and_not_written_as_status_brings_its_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path, started=NOON, status="running")
    for rank in range(2):
        append_events(run.dir, rank, step(rank, 7))
    ended = RunEnded(time=NOON + 9, status="finished", exit_code=0, elapsed_ms=9e3)
    run.dir.run_events.write_bytes(encode_event(ended))
    assert recorded_exit_code(run.dir, PLAN) == 0
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.elapsed_s, status.step, status.loss) == ("finished", 9.0, 7, 1.5)


def test_the_pace_begins_anew_where_the_clock_was_set_back() -> None:
    pace = Pace()
    for number, time in enumerate((100.0, 101.0, 102.0, 12.0, 13.0, 14.0)):
        pace.note(time, number)
    assert pace.updates_per_s == pytest.approx(1.0)
