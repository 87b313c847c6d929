"""Figures of a script of which less is seen than of others: absent in every face, never 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from row_texts import row_text

from gputrain_tui.console.widgets.overlay_chart import OverlayLine, legend
from gputrain_tui.console.widgets.rank_columns import rate_in_steps, sort_ranks
from gputrain_tui.console.widgets.rank_facts import facts
from gputrain_tui.console.widgets.rank_table import GridView, draw_grid
from gputrain_tui.console.widgets.run_header import RunHeading, draw_header
from gputrain_tui.console.widgets.step_bars import phases_of
from gputrain_tui.headless.closing_report import closing_lines, status_line
from gputrain_tui.headless.progress import paint, plain_line, progress_line
from gputrain_tui.history.comparison import CurveHistory
from gputrain_tui.history.export.steps import SingleStep
from gputrain_tui.history.export.tensorboard_folder import over_ranks
from gputrain_tui.state import RunState
from gputrain_tui.state.totals import ZERO_TOTALS
from trainer.contract.record import Finding, RankState, RunEnded, RunStarted, Step, mean_samples, single_steps
from trainer.contract.record.downsampled import DownsampledBlock, Downsampler, block_file
from trainer.telemetry.instrument.fetched_batches import plus, size_of
from trainer.telemetry.step_events import merge


def a_step(rank: int, number: int, **fields: Any) -> Step:
    known: dict[str, Any] = {"step_ms": 50.0, "forward_ms": 20.0, "backward_ms": 20.0, "other_ms": 10.0}
    return Step(time=100.0 + number * 0.05, rank=rank, step=number, epoch=1, steps=1, **(known | fields))


def state_of(*samples: int | None, steps: int = 100) -> RunState:
    """Return a run of as many ranks, each with so many samples in a step."""
    state = RunState()
    state.apply(RunStarted(time=100.0, run="r", recipe="demo", world_size=len(samples), run_dir="/r"))
    for rank, count in enumerate(samples):
        state.apply(RankState(time=100.0, rank=rank, state="training"))
        for number in range(1, steps + 1):
            state.apply(a_step(rank, number, samples=count))
    return state


def faces(state: RunState) -> list[str]:
    """Return the run as each view shows it while it goes on, and its end."""
    head = RunHeading(status="running", name="n", id="i", world_size=2, hosts=1, summary=state.figures)
    views = list(state.ranks.values())
    grid = GridView(rows=views, ranks=len(views), in_steps=rate_in_steps(views))
    shown = [
        plain_line(state, now=105.0),
        *(paint(progress_line(state, width, now=105.0), colour=False) for width in (120, 60)),
        row_text(draw_header(head, 160, 2)[1]),
        "\n".join(map(row_text, draw_grid(grid, 160, 5))),
        " ".join(f"{name} {value}" for name, value, _ in facts(state, 0, 105.0)),
    ]
    state.apply(RunEnded(time=106.0, status="finished", exit_code=0))
    closing = [*closing_lines(state, 160), status_line(state)]
    return [*shown, "\n".join(paint(pieces, colour=False) for pieces in closing)]


@pytest.mark.parametrize("unknown", [None, 0], ids=["not counted", "none read"])
def test_without_samples_every_face_has_steps_a_second_and_no_number_that_was_not_measured(unknown: int | None) -> None:
    for text in faces(state_of(unknown, unknown)):
        assert "20.0" in text, text
        assert "steps/s" in text, text
        for wrong in (" samples", "smp/s", "0.0000", " 0.0 "):
            assert wrong not in text.replace("not seen   samples", ""), text
    assert "not seen   samples: no batch was seen whose tensors have one leading dimension; if a step calls" in text
    assert "not seen   the wait for data: it comes from no torch DataLoader" in text


def test_the_closing_report_has_the_reason_that_a_rank_gives_for_unknown_samples() -> None:
    state = state_of(None, None)
    why = "samples: gradients are averaged over 1 of 2 ranks"
    state.apply(Finding(time=105.0, kind="not_measured", severity="info", rank=1, cause="no_samples", message=why))
    *_, closing = faces(state)
    assert f"not seen   {why}" in closing
    assert "no batch was seen" not in closing


def test_with_samples_no_face_has_steps_a_second() -> None:
    for text in faces(state_of(8, 8)):
        assert "steps/s" not in text, text
        assert any(rate in text for rate in ("320", "160.0")), text


def test_a_run_whose_first_stage_reads_the_data_counts_the_samples_of_that_rank() -> None:
    state = state_of(8, None)
    assert state.figures.rate == (pytest.approx(160.0), "samples/s")
    assert [view.sums.samples_per_s for view in state.ranks.values()] == [pytest.approx(160.0), None]
    assert sort_ranks(list(state.ranks.values()), {}, "rate", descending=True)[0].rank == 0


def test_a_rate_is_over_the_steps_whose_samples_are_known() -> None:
    state = state_of(8, steps=10)
    state.apply(a_step(0, 11, samples=None, step_ms=10_000.0))
    assert state.figures.samples_per_s == pytest.approx(160.0)


def test_samples_of_a_few_steps_are_neither_a_rate_nor_a_count_of_all() -> None:
    state = state_of(8, steps=10)
    for number in range(11, 31):
        state.apply(a_step(0, number, samples=None))
    for text in faces(state):
        assert "steps/s" in text, text
        assert " samples" not in text.replace("not seen   samples", ""), text


def test_data_of_no_loader_has_no_share_and_phases_still_add_up() -> None:
    (view,) = state_of(8).ranks.values()
    assert phases_of(view) == pytest.approx((0.0, 20.0, 20.0, 0.0, 0.0, 10.0))
    assert (view.sums.share("data"), view.sums.mean_phase_ms("data")) == (None, None)
    assert (view.sums.compute_share, view.sums.share("other")) == (pytest.approx(0.8), pytest.approx(0.2))


def test_merged_split_and_downsampled_steps_have_no_samples_where_they_had_none(tmp_path: Path) -> None:
    steps = [a_step(0, number) for number in range(1, 17)]
    assert merge(steps).samples is None
    partly = merge([a_step(0, 1, samples=8), a_step(0, 2), a_step(0, 3, samples=8)])
    assert (partly.samples, partly.samples_each) == (16, [8, None, 8])
    assert [each.samples for each in single_steps(partly)] == [8, None, 8]
    totals = ZERO_TOTALS.plus(partly)
    assert (totals.counted_steps, totals.samples_per_s) == (2, pytest.approx(160.0))
    assert mean_samples(partly) is None
    assert [each.samples for each in single_steps(merge(steps), means=True)] == [None] * 16
    downsampler = Downsampler(tmp_path, "0", 0)
    for step in steps:
        downsampler.add(step, 100)
    downsampler.finish()
    lines = downsampler.take()[block_file(tmp_path, "0", 16)]
    assert {block.samples for block in msgspec.json.Decoder(DownsampledBlock).decode_lines(lines)} == {None}
    row = [SingleStep(1, 1, True, a_step(rank, 1)) for rank in (0, 1)]
    assert "train/samples" not in over_ranks(row)[0]


def test_runs_are_compared_by_steps_a_second_where_samples_are_not_known() -> None:
    found = CurveHistory(1)
    for number in range(1, 101):
        found.apply(a_step(0, number))
    assert not found.series.axis.has("samples")
    assert found.points(4, over_time=False, measure="steps_per_s").values == pytest.approx([20.0] * 4)
    assert all(value != value for value in found.points(4, over_time=False, measure="samples_per_s").values)
    line = OverlayLine(name="one", values=[], rate=found.rates.rate)
    assert "steps/s      20.0 " in row_text(legend([line], 140)[0])


def test_a_reason_that_no_step_is_seen_stands_in_the_header_until_a_step_is() -> None:
    state = RunState(world_size=1)
    found = Finding(time=1.0, kind="not_measured", severity="info", rank=0, cause="no_steps", message="no x was seen")
    state.apply(found)
    assert state.unmeasured is found
    head = RunHeading(
        status="running", name="n", id="i", world_size=1, hosts=1, summary=state.figures, unmeasured=found.message
    )
    assert "no x was seen" in row_text(draw_header(head, 120, 2)[1])
    state.apply(Finding(time=2.0, kind="not_measured", state="cleared", rank=0, cause="no_steps", severity="info"))
    assert state.unmeasured is None


def test_a_finding_marks_all_ranks_that_it_is_about() -> None:
    state = state_of(8, 8, 8)
    state.apply(Finding(time=200.0, kind="non_finite", severity="critical", rank=0, ranks=[0, 1, 2], cause="loss"))
    assert state.flagged == {0, 1, 2}


X, Y, LONG = torch.zeros(8, 3), torch.zeros(8), torch.zeros(9, 2)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (X, 8),
        ((X, Y), 8),
        ({"x": X, "more": [Y, {"y": Y}], "name": "a", "weight": torch.tensor(0.5)}, 8),
        ([X, LONG], None),
        ({"nodes": LONG, "edges": torch.zeros(2, 40)}, None),
        ([{"x": X[0]}, {"x": X[1]}, {"x": LONG}], None),
        ((), None),
        ("text", None),
        ([1.0, 2.0], None),
        (torch.tensor(1.0), None),
    ],
)
def test_a_batch_has_samples_if_its_tensors_have_one_leading_dimension(batch: Any, samples: int | None) -> None:
    assert size_of(batch) == (samples, None)
    assert plus((0, None), size_of(batch))[0] == samples
    assert plus((8, None), (None, None)) == (None, None)
