from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest

import gputrain_tui.history.series
from gputrain_tui.history.pyramid import POINTS_PER_LEVEL, Band, BandPyramid
from gputrain_tui.history.series import Series, Window, smooth, smooth_window
from gputrain_tui.state import RunState
from trainer.contract.record import CollectiveGroup, Step


def step(rank: int, number: int, *, time: float | None = None, steps: int = 1, **values: Any) -> Step:
    base: dict[str, Any] = {"loss": 2.0, "step_ms": 100.0, "sync_exposed_ms": 10.0}
    return Step(
        time=float(number) if time is None else time,
        rank=rank,
        step=number,
        epoch=1,
        steps=steps,
        samples=8 * steps,
        **{**base, **values},
    )


def curve(values: list[float | None], *, ranks: int = 1) -> Series:
    series = Series(ranks)
    for number, value in enumerate(values, 1):
        for rank in range(ranks):
            series.apply(step(rank, number, loss=value))
    return series


def same(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        a == pytest.approx(b, rel=1e-5) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(found, expected, strict=True)
    )


def test_a_step_is_drawn_when_its_last_rank_has_reported_it() -> None:
    series = Series(3)
    for rank, loss in ((2, 5.0), (0, 1.0)):
        series.apply(step(rank, 1, loss=loss))
    assert series.version == 0
    series.apply(step(1, 1, loss=2.0))
    assert series.version == 1
    assert series.latest["loss"] == Band(1.0, 8 / 3, 5.0)


def test_the_single_steps_of_an_event_are_drawn_and_lateness_that_alternates_is_seen() -> None:
    series = Series(2)
    for rank in range(2):
        late = [30.0 if number % 2 == rank else 0.5 for number in range(8)]
        series.apply(
            step(
                rank,
                8,
                steps=8,
                sync_exposed_ms=15.25,
                losses=[float(n) for n in range(8)],
                step_ms_each=[40.0] * 8,
                sync_exposed_ms_each=late,
            )
        )
    assert (series.first_step, series.last_step) == (1, 8)
    assert same(series.window("loss", 8).middle, [float(n) for n in range(8)])
    assert same(series.window("late_ms", 8, rank=0).middle, [0.0, 29.5] * 4)
    assert same(series.window("late_ms", 8, rank=1).middle, [29.5, 0.0] * 4)


def test_ranks_may_be_read_one_file_after_the_other() -> None:
    series = Series(4)
    for rank in range(4):
        for number in range(1, 101):
            series.apply(step(rank, number, loss=float(rank + number)))
    assert series.version == 100
    window = series.window("loss", 100)
    assert (window.first_step, window.last_step) == (1, 100)
    assert window.low[41] == 42
    assert window.high[41] == 45


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1, 2, 3, 4]),
        ([1.0, None, 3.0, 4.0], [1, math.nan, 3, 4]),
        ([1.0, math.inf, 3.0, math.nan], [1, math.nan, 3, math.nan]),
        ([None, None, None, None], [math.nan] * 4),
    ],
    ids=["all there", "a gap", "not finite", "nothing"],
)
def test_a_missing_number_is_a_gap(values: list[float | None], expected: list[float]) -> None:
    series = curve(values)
    assert same(series.window("loss", 4).middle, expected)
    assert same(series.window("loss", 4, rank=0).middle, expected)


def test_few_steps_are_joined_by_straight_lines() -> None:
    window = curve([1.0, 3.0]).window("loss", 6)
    assert same(window.middle, [1, 1 + 2 / 3, 1 + 4 / 3, 3, math.nan, math.nan])


def test_synchronisation_that_is_measured_now_and_then_has_no_gaps() -> None:
    series = Series(1)
    for number in range(1, 9):
        series.apply(step(0, number, sync_exposed_ms=float(number) if number % 4 == 1 else None))
    assert same(series.window("sync_exposed_ms", 8).middle, [1, 2, 3, 4, 5, *[math.nan] * 3])


def test_an_empty_run_has_an_empty_window() -> None:
    window = Series().window("loss", 10)
    assert same(window.middle, [math.nan] * 10)
    assert Series().window("loss", 10, rank=3).middle == pytest.approx([math.nan] * 10, nan_ok=True)


def test_a_spike_of_one_step_survives_in_a_long_run() -> None:
    values = [1.0] * 6_000
    values[3_457] = 99.0
    series = curve([*values])
    window = series.window("loss", 100)
    assert max(window.high) == 99
    assert window.high.index(99.0) == int(3_457 * 100 / 6_000)
    assert window.low == [1.0] * 100


@pytest.mark.parametrize("count", [1, 3, 4, 5, 63, 64, 65, 1000, 20_000, 70_001])
def test_points_are_complete_in_order_and_few(count: int) -> None:
    pyramid = BandPyramid()
    for number in range(1, count + 1):
        pyramid.append(number, Band(number, number, number))
    for first, last in ((1, count), (max(1, count - 99), count), (count // 3 + 1, count // 2 + 1)):
        points = list(pyramid.points(first, last, 400))
        assert all(a.step < b.step for a, b in pairwise(points))
        assert len(points) <= 400 + 4 * 12
        assert points[-1].band.high == last or last < count
        if first == 1:
            assert points[0].step == 1
            assert min(point.band.low for point in points) == 1


def test_memory_is_bounded_over_a_week() -> None:
    pyramid = BandPyramid(kept=64)
    for number in range(1, 100_001):
        pyramid.append(number, Band(0, 0, 0))
    every_point = list(pyramid.points(1, 100_000, most=1 << 30))
    assert len(every_point) <= 2 * 64 * math.ceil(math.log(100_000, 4))
    assert every_point[0].step == 1
    assert POINTS_PER_LEVEL >= 4096


def test_frames_of_many_ranks_are_bounded_and_cover_the_run() -> None:
    series = Series(128)
    for number in range(1, 601):
        for rank in range(128):
            series.apply(step(rank, number, sync_exposed_ms=float(rank)))
    frames = series.frames(1, 600, 400)
    assert len(frames) <= 400
    assert frames[0].first_step == 1
    assert frames[-1].last_step == 600
    assert all(a.last_step < b.first_step for a, b in pairwise(frames))
    assert frames[0].values[3] is not None
    assert list(frames[0].values[3]) == pytest.approx([127.0 - rank for rank in range(128)])


def test_the_last_steps_alone_can_be_seen() -> None:
    window = curve([float(number) for number in range(1, 1001)]).window("loss", 10, last=10)
    assert (window.first_step, window.last_step) == (991, 1000)
    assert same(window.middle, [float(number) for number in range(991, 1001)])


def test_steps_of_ranks_that_merge_them_at_different_places_are_matched() -> None:
    series = Series(2)
    for rank in range(2):
        number, chunk = 0, 3 + rank
        while number < 600:
            number += chunk
            series.apply(step(rank, number, steps=chunk, loss=float(rank)))
    series.flush()
    window = series.window("loss", 50)
    assert series.version >= 600 / 4 - 1
    assert window.low[5:45] == [0.0] * 40
    assert window.high[5:45] == [1.0] * 40


def test_a_history_of_samples_gives_the_bands_of_all_ranks() -> None:
    source = random.Random(4)
    series = Series(8)
    series.coarsen(1000)
    for rank in range(8):
        for begin in range(0, 64_000, 500):
            number = begin + source.randrange(1, 400)
            for n in range(number, number + 5):
                series.apply(step(rank, n, loss=float(rank)))
    series.refine()
    window = series.window("loss", 50)
    assert window.low[:49] == [0.0] * 49
    assert window.middle[:49] == [3.5] * 49
    assert window.high[:49] == [7.0] * 49
    last = series.last_step
    for rank in range(8):
        series.apply(step(rank, last + 1, loss=50.0))
    assert series.last_step == last + 1
    assert series.window("loss", 50).middle[-1] > 3.5


def test_a_rank_that_never_reports_does_not_hold_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gputrain_tui.history.series, "MAX_OPEN_EVENTS", 2048)
    series = Series(2)
    steps = 2000
    for number in range(1, steps + 1):
        series.apply(step(0, number))
    assert steps - 1024 <= series.version < steps


def test_a_late_report_changes_nothing() -> None:
    series = Series(1)
    for number in (1, 2, 3):
        series.apply(step(0, number))
    series.apply(step(0, 2, time=2.0, loss=50.0))
    assert max(series.window("loss", 3).high) == 2.0


def test_a_restart_does_its_steps_again_and_the_curve_has_them_once() -> None:
    series = curve([float(number) for number in range(1, 201)], ranks=2)
    for number in range(101, 151):
        for rank in range(2):
            series.apply(step(rank, number, time=500.0 + number, loss=0.0))
    window = series.window("loss", 150)
    assert (window.first_step, window.last_step) == (1, 150)
    assert same(window.middle, [*map(float, range(1, 101)), *[0.0] * 50])
    assert same(series.window("loss", 150, rank=1).middle, window.middle)


@pytest.mark.parametrize("back_to", [1, 2, 17, 5_000, 19_990])
def test_a_pyramid_can_be_cut_anywhere_and_goes_on(back_to: int) -> None:
    pyramid = BandPyramid(kept=64)
    for number in range(1, 20_001):
        pyramid.append(number, Band(1, 1, 1))
    pyramid.truncate(back_to)
    for number in range(back_to, back_to + 3000):
        pyramid.append(number, Band(2, 2, 2))
    points = list(pyramid.points(1, back_to + 3000, 4000))
    assert all(a.step < b.step for a, b in pairwise(points))
    assert [point.band.high for point in points] == sorted(point.band.high for point in points)
    assert pyramid.last_step == back_to + 2999


def test_lateness_is_the_longest_wait_less_the_ranks_own() -> None:
    series = Series(3)
    for rank, wait in enumerate((30.0, 5.0, 28.0)):
        series.apply(step(rank, 1, sync_exposed_ms=wait))
    assert [series.window("late_ms", 1, rank=rank).middle for rank in range(3)] == [[0], [25], [2]]


def test_lateness_is_that_among_ranks_that_wait_for_each_other() -> None:
    state = RunState(world_size=4)
    series = Series(4, state.synchronised)
    for rank, ranks in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]]):
        state.apply(CollectiveGroup(time=1.0, rank=rank, name="pair", ranks=ranks, backend="gloo"))
    for rank, sync in enumerate([30.0, 5.0, 300.0, 298.0]):
        series.apply(step(rank, 1, sync_exposed_ms=sync))
    assert [series.window("late_ms", 1, rank=rank).middle for rank in range(4)] == [[0], [25], [0], [2]]


def test_smoothing_keeps_a_constant_and_its_gaps() -> None:
    assert same(smooth([2.0, 2.0, math.nan, 2.0], 10, 1), [2.0, 2.0, math.nan, 2.0])
    assert smooth([1.0, 5.0], 0, 1) == [1.0, 5.0]


def test_smoothing_begins_at_the_first_value_and_forgets_by_the_number_of_steps() -> None:
    kept = math.exp(-1 / 10)
    assert smooth([1.0, 5.0], 10, 1) == pytest.approx([1.0, (kept * 1.0 + 5.0) / (kept + 1.0)])
    one_per_step = [float(step > 50) for step in range(100)]
    every_fifth = [float(step > 50) for step in range(4, 100, 5)]
    smoothed = smooth(one_per_step, 20, 1)
    assert smooth(every_fifth, 20, 5) == pytest.approx(smoothed[4::5], abs=0.1)


def test_a_value_that_is_not_finite_does_not_hide_those_after_it() -> None:
    assert smooth([1.0, math.inf, 1.0], 10, 1) == pytest.approx([1.0, math.inf, 1.0])


def test_a_smoothed_median_stays_inside_its_band() -> None:
    source = random.Random(7)
    medians = [source.gauss(0.0, 5.0) for _ in range(200)]
    window = Window(
        first_step=1,
        last_step=200,
        low=[value - source.random() for value in medians],
        middle=medians,
        high=[value + source.random() for value in medians],
    )
    found = smooth_window(window, 50)
    assert found.middle != window.middle
    assert all(low <= mid <= high for low, mid, high in zip(found.low, found.middle, found.high, strict=True))


def test_a_smoothed_band_is_the_same_in_every_range_of_steps() -> None:
    source = random.Random(3)
    series = Series(2)
    for number in range(1, 2001):
        for rank in range(2):
            series.apply(step(rank, number, loss=4 * math.exp(-number / 300) + source.gauss(0, 0.5)))

    def at(wanted: int, first: int, last: int) -> float:
        columns = last - first + 1
        window = series.smoothed_window("loss", columns, span=(first, last), over=100)
        line = series.smoothed_window("loss", columns, rank=0, span=(first, last), over=100).middle
        assert abs(line[wanted - first] - window.middle[wanted - first]) < 0.2
        return window.middle[wanted - first]

    whole = at(1010, 1, 2000)
    for first, last in ((501, 1500), (901, 1200), (1001, 1100), (1008, 1015)):
        assert at(1010, first, last) == pytest.approx(whole, abs=0.02)


def test_more_columns_than_steps_smooth_as_one_per_step_does() -> None:
    series = Series(1)
    for number in range(1, 41):
        series.apply(step(0, number, loss=float(number % 7)))
    each = series.smoothed_window("loss", 40, span=(1, 40), over=10)
    fine = series.smoothed_window("loss", 400, span=(1, 40), over=10)
    assert fine.middle[::10][10:] == pytest.approx(each.middle[10:], abs=0.5)


def test_a_median_stays_inside_its_band_also_after_an_infinite_one() -> None:
    window = Window(first_step=1, last_step=3, low=[1.0, 1.0, 1.0], middle=[1.0, 100.0, 1.0], high=[1.0, math.inf, 1.0])
    found = smooth_window(window, 100)
    assert found.middle == pytest.approx([1.0, 100.0, 1.0])
    assert all(low <= mid <= high for low, mid, high in zip(found.low, found.middle, found.high, strict=True))


def test_random_runs_never_break_the_curves() -> None:
    source = random.Random(7)
    for _ in range(30):
        world = source.choice((0, 1, 2, 5))
        series = Series(world)
        number = 0
        for _ in range(source.randrange(200)):
            number = max(1, number + source.choice((1, 1, 1, 2, -5)))
            for rank in range(source.randrange(6)):
                loss = source.choice((None, 1.0, math.nan, math.inf, -1e308, 1e308))
                wait = source.choice((None, 0.0, 1e9))
                series.apply(
                    step(rank, number, time=source.random() * 1e3, steps=source.choice((1, 1, 7)), loss=loss,
                         sync_exposed_ms=wait)
                )  # fmt: skip
        series.flush()
        for columns in (1, 2, 33):
            for last in (None, 1, 50):
                assert len(series.window("loss", columns, last=last).middle) == columns
                assert len(series.window("late_ms", columns, rank=1, last=last).middle) == columns
