"""What the charts of a run's page show: the console's curves, in a size that stays the same for any run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import synthetic

from gputrain_tui.history.run_folders import Run
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import page_data, report_page
from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.run_charts import COLUMNS, RunCharts, run_charts
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks
from trainer.contract.record import Step, decode_events


def charts_of(run: Run) -> tuple[RunReport, RunCharts]:
    blocks = StepBlocks()
    live = read_run_record(run, on_step=blocks.apply)
    report = run_report(live.state, run_facts(live))
    charts = run_charts(live.series, live.hardware, blocks, live.metrics, loss_unit=report.loss_unit)
    live.close()
    return report, charts


def test_a_column_of_a_short_run_is_a_step_of_its_record(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, ranks_per_node=3, steps=40, status="finished", straggler=2)
    _, charts = charts_of(run)
    steps: dict[int, list[Step]] = {}
    for rank in range(3):
        for event in decode_events(run.dir.rank_events(rank).read_bytes()):
            if isinstance(event, Step):
                steps.setdefault(event.step, []).append(event)
    assert (charts.first_step, charts.last_step) == (1, 40)
    loss, sync, step_ms = charts.curves
    assert [loss.name, sync.name, step_ms.name] == ["loss", "sync_exposed_ms", "step_ms"]
    for step, events in steps.items():
        losses = [event.loss for event in events if event.loss is not None]
        assert loss.middle[step - 1] == pytest.approx(fmean(losses), rel=1e-4)
        assert loss.high[step - 1] == pytest.approx(max(losses), rel=1e-4)
        assert [loss.ranks[event.rank][step - 1] for event in events] == pytest.approx(losses, rel=1e-4)
    for block in charts.blocks:
        assert block.first_step == block.last_step
        assert sum(part.ms for part in block.parts) == pytest.approx(
            sum(event.step_ms or 0 for event in steps[block.first_step]) / 3, rel=0.05
        )
    assert charts.lateness is not None
    last = charts.lateness.columns[-1]
    assert max(range(3), key=lambda rank: last[rank] or 0.0) == 2


@pytest.mark.parametrize(("ranks", "steps"), [(1024, 6), (1, 3_000), (2, 0), (2, 1)])
def test_the_page_of_any_run_stays_below_two_megabytes(ranks: int, steps: int, tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, ranks_per_node=ranks, steps=steps, status="finished")
    report, charts = charts_of(run)
    assert len(report_page(report, charts)) < 2_000_000
    assert all(len(curve.middle) <= COLUMNS for curve in charts.curves)
    assert (charts.lateness is None) == (ranks == 1 or steps == 0)
    data = json.loads(page_data(report, charts))
    assert data["charts"]["last_step"] == steps


def test_the_data_cannot_end_its_element(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, name="</script><b>\u2028", steps=2, status="finished")
    text = page_data(*charts_of(run))
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text)["report"]["recipe"] == "</script><b>\u2028"


def test_the_blocks_of_a_run_end_with_its_last_step() -> None:
    blocks = StepBlocks()
    for step in range(1, 351):
        blocks.apply(Step(time=float(step), rank=0, step=step, epoch=1, steps=1, samples=4, loss=2.0))
    assert blocks.length == 4
    assert blocks.last_step == 350
    assert [(first, last) for first, last, _ in blocks.numbered()][-2:] == [(345, 348), (349, 350)]
    assert blocks.step_after(4 * 350, lambda sums: sum(each.samples for each in sums)) == 350
    assert not blocks.around(351)
