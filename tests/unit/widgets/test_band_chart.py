from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from row_texts import row_text
from run_in_memory import RunInMemory, run_in_memory

from gputrain_tui.console.widgets.curve_drawing import Curve, Scale, chart_columns, draw_curve
from gputrain_tui.console.widgets.drawing import Row
from gputrain_tui.history.series import Window

RUN = run_in_memory()


def loss_curve(run: RunInMemory, width: int, *, rank: int | None = None, scale: Scale = "linear") -> Curve:
    columns = chart_columns(width)
    return Curve(
        title="loss",
        unit="nats",
        is_loss=True,
        window=run.series.window("loss", columns),
        value=run.series.latest["loss"].middle,
        ranks=run.series.world_size,
        rank=rank,
        rank_line=[] if rank is None else run.series.window("loss", columns, rank=rank).middle,
        rank_value=None if rank is None else run.state.ranks[rank].loss,
        scale=scale,
    )


def curve_of(values: list[float], *, first: int = 1, scale: Scale = "linear") -> Curve:
    window = Window(first_step=first, last_step=first + len(values) - 1, low=values, middle=values, high=values)
    return Curve(title="loss", window=window, value=values[-1] if values else math.nan, scale=scale)


def is_curve(char: str) -> bool:
    return 0x2800 < ord(char) <= 0x28FF


def braille(rows: list[Row]) -> int:
    return sum(is_curve(char) for row in rows for char in row_text(row))


@pytest.mark.parametrize(("width", "height"), [(38, 6), (58, 12), (98, 18)])
def test_a_falling_loss_is_drawn_from_the_upper_left_to_the_lower_right(width: int, height: int) -> None:
    rows = draw_curve(loss_curve(RUN, width, rank=5), width, height)
    assert [len(row_text(row)) for row in rows] == [width] * height
    assert row_text(rows[0]).startswith(f"loss 1.5264 nats{' mean' * (width > 70)}  rank 5 1.6237 ")
    assert row_text(rows[-1]).rstrip().endswith("step 200")
    plot = [row_text(row)[8:] for row in rows[1:-1]]
    heights = [next(y for y, line in enumerate(plot) if is_curve(line[x])) for x in range(width - 8)]
    assert heights[0] < heights[-1] == max(heights)
    assert all(after >= before - 1 for before, after in pairwise(heights))


def test_a_logarithmic_curve_has_round_decades() -> None:
    rows = draw_curve(loss_curve(RUN, 58, scale="log"), 58, 12)
    assert row_text(rows[0]).endswith("mean in min–max of 16 ranks  log")
    assert labels(rows) == [10, 5, 2]


def test_a_logarithmic_curve_within_a_decade_still_has_labels() -> None:
    rows = draw_curve(curve_of([1.3 + n / 50 for n in range(50)], scale="log"), 40, 12)
    labels = [row_text(row)[:6].strip() for row in rows[1:-1]]
    assert len(set(labels) - {""}) >= 2


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([], 0),
        ([math.nan] * 40, 0),
        ([2.5], 1),
        ([2.5] * 40, 20),
        ([0.0] * 40, 20),
        ([-1.0, 1.0] * 20, 20),
        ([1e-30] * 20 + [1e30] * 20, 20),
        ([-1.7e308] * 20 + [1.7e308] * 20, 20),
        ([5e-324] * 20 + [1e-323] * 20, 1),
    ],
    ids=["empty", "nothing measured", "one point", "constant", "zero", "both signs", "huge", "greatest", "least"],
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_odd_curves_are_drawn_within_their_cells(values: list[float], marks: int, scale: Scale) -> None:
    rows = draw_curve(curve_of(values, scale=scale), 40, 10)
    assert len(rows) == 10
    assert {len(row_text(row)) for row in rows} == {40}
    if scale == "linear":
        assert braille(rows) >= marks


def test_an_empty_chart_shows_the_reason() -> None:
    assert "no step yet" in "".join(map(row_text, draw_curve(curve_of([]), 40, 8)))


def test_a_gap_stays_empty() -> None:
    values = [1.0] * 20 + [math.nan] * 20 + [1.0] * 20
    [line] = [row_text(row) for row in draw_curve(curve_of(values), 38, 4)[1:] if braille([row])]
    assert line[8:].count(" ") + line[8:].count("┈") == 10


def test_where_rank_and_mean_meet_both_are_seen() -> None:
    curve = loss_curve(RUN, 58, rank=5)
    roles = {role for row in draw_curve(curve, 58, 16) for _, role in row}
    assert {"rank-on-band", "middle-on-band"} <= roles


def test_no_random_curve_leaves_its_cells() -> None:
    source = random.Random(3)
    odd = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 1e-308, 1.0)
    for _ in range(300):
        width, height = source.randrange(1, 90), source.randrange(1, 20)
        columns = chart_columns(width)
        low, median, high = (
            [source.choice(odd) if source.random() < 0.3 else source.gauss(0, 9) for _ in range(columns)]
            for _ in range(3)
        )
        curve = Curve(
            title="t" * source.randrange(12),
            window=Window(first_step=1, last_step=source.randrange(1, 10**9), low=low, middle=median, high=high),
            value=source.choice(odd),
            ranks=source.randrange(5000),
            rank=source.choice((None, 7)),
            rank_line=source.choice(([], median)),
            scale=source.choice(("linear", "log")),
            blocks=source.random() < 0.7,
        )
        rows = draw_curve(curve, width, height)
        assert len(rows) == height
        assert all(len(row_text(row)) == width for row in rows)


def spiky(values: list[float], **more: Any) -> Curve:
    return replace(curve_of(values), spiky=True, **more)


def labels(rows: list[Row]) -> list[float]:
    return [float(text) for row in rows[1:-1] if (text := row_text(row)[:6].strip())]


def test_a_rare_spike_does_not_hide_the_usual_range() -> None:
    values = [20.0 + n % 5 for n in range(60)] + [2000.0] + [20.0 + n % 5 for n in range(39)]
    whole, cropped = draw_curve(curve_of(values), 58, 12), draw_curve(spiky(values), 58, 12)
    assert max(labels(whole)) == 2000
    assert max(labels(cropped)) < 40
    assert "▴ spikes up to 2,000" in row_text(cropped[0])
    assert row_text(cropped[1]).index("▴") == 8 + 60 // 2


def test_a_new_level_at_the_end_is_no_spike() -> None:
    values = [20.0] * 90 + [2000.0] * 4
    assert max(labels(draw_curve(spiky(values), 58, 12))) == 2000


def test_spikes_stay_whole_on_a_logarithmic_scale_and_where_they_are_low() -> None:
    values = [20.0 + n % 5 for n in range(60)] + [28.0] + [20.0 + n % 5 for n in range(39)]
    for curve in (spiky(values), spiky([*values[:60], 2000.0, *values[61:]], scale="log")):
        assert not any("▴" in row_text(row) for row in draw_curve(curve, 58, 12))
