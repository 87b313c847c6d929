from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gputrain_tui.history import step_axis
from gputrain_tui.history.comparison import CurveHistory
from gputrain_tui.history.series import Series
from gputrain_tui.history.step_axis import StepAxis
from gputrain_tui.state import RunState
from trainer.contract.record import Step, decode_events, encode_event
from trainer.contract.record.downsampled import Downsampler
from trainer.host.boot import ClockSet
from trainer.telemetry.step_events import merge


def step(number: int, time: float, *, rank: int = 0, steps: int = 1, samples: int = 8, **values: float) -> Step:
    return Step(
        time=time, rank=rank, step=number, epoch=1, steps=steps, samples=samples, loss=1.0, step_ms=100.0, **values
    )  # type: ignore[arg-type]


def test_a_step_has_a_time_and_samples_of_all_ranks() -> None:
    series = Series(2)
    axis = series.axis
    for number in range(1, 11):
        series.apply(step(number, 100.0 + number))
        series.apply(step(number, 100.0 + number, rank=1, samples=24))
    assert axis.at("step", 4) == 4
    assert axis.at("time", 4) == pytest.approx(3.1)
    assert axis.at("time", 4.5) == pytest.approx(3.6)
    assert axis.at("samples", 4) == pytest.approx(4 * 32)
    assert (axis.has("tokens"), axis.has("samples")) == (False, True)


def test_shares_of_a_batch_that_change_leave_its_samples_on_a_line() -> None:
    series = Series(2)
    shares = [(12, 12)] * 5 + [(18, 6)] * 15 + [(12, 12)] * 5  # the steps from 16 on are done again after a restart
    for number, both in zip((*range(1, 21), *range(16, 21)), shares, strict=True):
        for rank, samples in enumerate(both):
            series.apply(step(number, float(number) + 10 * (both == (12, 12)), rank=rank, samples=samples))
    assert [series.axis.at("samples", number) for number in range(21)] == [24 * number for number in range(21)]


@pytest.mark.parametrize("shift_s", [3600.0, -3600.0], ids=["forward", "back"])
def test_a_clock_that_is_set_moves_no_step(shift_s: float) -> None:
    axis, curve, state = StepAxis(), CurveHistory(1), RunState(world_size=1, max_updates=100)
    for number in range(1, 51):
        is_set = number > 20
        pause = 30.0 if number > 30 else 0.0
        event = step(number, 1e6 + number + pause + shift_s * is_set, clock_set_ms=1e3 * shift_s * is_set)
        (read,) = decode_events(encode_event(event))
        assert isinstance(read, Step)
        for reader in (axis, curve, state):
            reader.apply(read)
    assert axis.at("time", 50) == pytest.approx(79.1), "a pause takes its time"
    assert (curve.seconds_at(20), curve.last_second) == (pytest.approx(19.1), pytest.approx(79.1))
    assert state.updates_per_s == pytest.approx(49 / 79)


def test_the_clock_counts_as_set_where_it_leaves_the_time_since_the_boot() -> None:
    times = {"now": 1e9, "boot": 50.0}
    clock = ClockSet(lambda: times["now"], lambda: times["boot"])
    times = {"now": 1e9 + 10.3, "boot": 60.0}
    assert clock.ms() is None, "a small correction"
    times = {"now": 1e9 - 3600.0, "boot": 70.0}
    assert clock.ms() == -3_620_000.0


def test_an_event_and_a_block_of_several_steps_have_the_shift_of_the_last_one(tmp_path: Path) -> None:
    steps = [step(number, 1e6 + number, clock_set_ms=5e3 * (number > 10)) for number in range(1, 17)]
    assert merge(steps).clock_set_ms == 5e3
    downsampler = Downsampler(tmp_path, "0", 0)
    for each in steps:
        downsampler.add(each, 100)
    downsampler.finish()
    (line,) = downsampler.take()[tmp_path / "0.16.ndjson"].splitlines()
    assert json.loads(line)["clock_set_ms"] == 5e3


def test_events_of_several_steps_are_interpolated() -> None:
    series = Series(1)
    axis = series.axis
    series.apply(step(10, 101.0, steps=10, samples=80))
    series.apply(step(20, 102.0, steps=10, samples=80, tokens=100))
    series.flush()
    assert axis.at("samples", 5) == 40
    assert axis.at("samples", 15) == 120
    assert axis.has("tokens")


def test_a_restarted_run_does_its_steps_again() -> None:
    axis = StepAxis()
    for number, time in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 12.0), (3, 13.0)):
        axis.apply(step(number, time))
    positions = [axis.at("time", number) for number in (1, 2, 3)]
    assert positions == pytest.approx([0.1, 11.1, 12.1])


def test_the_learning_rate_of_a_step_is_that_of_its_event() -> None:
    axis = StepAxis()
    assert math.isnan(axis.lr_at(1))
    for number, lr in ((1, 0.1), (2, 0.2), (3, 0.3)):
        axis.apply(step(number, float(number), lr=lr))
    assert [axis.lr_at(number) for number in (1, 2, 3, 9)] == [0.1, 0.2, 0.3, 0.3]


def test_memory_is_bounded_for_any_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_axis, "MAX_POINTS", 16)
    axis = StepAxis()
    for number in range(1, 5001):
        axis.apply(step(number, 0.1 * number))
    assert len(axis) <= 32
    for number in (1, 77, 2500, 4900):
        assert axis.at("time", number) == pytest.approx(0.1 * number, abs=0.2)
