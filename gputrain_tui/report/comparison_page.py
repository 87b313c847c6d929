"""The page of a comparison: its figures with their intervals, and the runs' curves over steps, samples and time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gputrain_tui.report import run_comparison
from gputrain_tui.report.page import json_text, page_html
from gputrain_tui.report.report_fields import StepPart
from gputrain_tui.report.step_blocks import StepBlocks
from gputrain_tui.state.figures import mean_step_ms, samples_per_s

Values = tuple[float | None, ...]


class BlockCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Means over a few consecutive steps each, and at which step, sample and time their middle is."""

    step: tuple[float, ...]
    samples: tuple[float, ...]
    """Over all ranks, since the record begins; empty where samples are not counted."""
    seconds: tuple[float, ...]
    """In steps, since the record begins."""
    loss: Values
    step_ms: Values
    samples_per_s: Values


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows of one run."""

    id: str
    state: str
    parts: tuple[StepPart, ...]
    curve: BlockCurve


def block_curve(blocks: StepBlocks) -> BlockCurve:
    """Return the curve of a run's blocks."""
    samples = time_ms = 0.0
    steps, of_samples, of_seconds = [], [], []
    rows: list[Values] = []
    for first, last, sums in blocks.numbered():
        here, here_ms = sum(each.samples for each in sums), run_comparison.block_time_ms(sums)
        steps.append((first + last) / 2)
        of_samples.append(samples + here / 2)
        of_seconds.append((time_ms + here_ms / 2) / 1e3)
        samples, time_ms = samples + here, time_ms + here_ms
        rows.append((run_comparison.block_loss(sums), mean_step_ms(sums), samples_per_s(sums)))
    loss, step_ms, rate = zip(*rows, strict=True) if rows else ((), (), ())
    return BlockCurve(
        step=tuple(steps),
        samples=tuple(of_samples) if samples else (),
        seconds=tuple(of_seconds) if time_ms else (),
        loss=loss,
        step_ms=step_ms,
        samples_per_s=rate,
    )


def comparison_page(comparison: run_comparison.RunComparison, runs: Sequence[run_comparison.RecordedRun]) -> str:
    """Return the page of a comparison of these runs."""
    compared = [
        ComparedRun(id=run.report.id, state=run.report.state, parts=run.report.parts, curve=block_curve(run.blocks))
        for run in runs
    ]
    unit = next((run.report.loss_unit for run in runs if run.report.loss_unit), "")
    data = json_text(
        {
            "comparison": comparison,
            "titles": [run_comparison.figure_title(figure) for figure in comparison.figures],
            "changes": [
                [run_comparison.change_text(each, relative=figure.relative) for each in figure.differences]
                for figure in comparison.figures
            ],
            "results": [run_comparison.limit_result(limit) for limit in comparison.limits],
            "runs": compared,
            "loss_unit": unit,
        }
    )
    return page_html(f"{', '.join(comparison.runs[1:])} against {comparison.runs[0]}", data, "compare.js")
