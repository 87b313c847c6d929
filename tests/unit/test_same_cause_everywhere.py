"""Who asks what is wrong with a run hears the same rank and cause from panel, table, list, report, page and compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import synthetic
from msgspec.structs import replace
from test_diagnosis import SimulatedRun, Slow, balanced, late

from gputrain_tui.console.widgets.findings import finding_entries
from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.headless.closing_report import status_line
from gputrain_tui.headless.report_text import report_lines
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import write_status
from gputrain_tui.history.summary import summarize
from gputrain_tui.report.comparison_limits import check_limits, parse_condition
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.page import report_page
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_comparison import RecordedRun, compare
from gputrain_tui.report.run_report import run_report
from gputrain_tui.report.step_blocks import StepBlocks
from gputrain_tui.state.finding_text import marking
from trainer.contract.record import Step

RANKS = 4


class RecordingRun(SimulatedRun):
    """A run whose steps are kept."""

    recorded: list[Step]

    def one_step(self, slow: Slow, loss: float | None) -> list[Step]:
        events = super().one_step(slow, loss)
        self.recorded += events
        return events


def recorded(folder: Path, slow: Slow, *, wire_ms: float) -> Run:
    """Return a run that is over, with the record and the status that its ranks and its supervisor wrote."""
    simulated = RecordingRun(RANKS, wire_ms=wire_ms)
    simulated.recorded = []
    found = simulated.steps(120, slow)
    run = synthetic.run(folder, ranks_per_node=RANKS, steps=0, status="finished")
    for event in simulated.recorded:
        synthetic.write(run.dir.rank_events(event.rank), event)
    synthetic.write(run.dir.run_events, *found)
    run.status.findings = marking(roll_up(simulated.state.findings.values(), simulated.state.ranks))
    write_status(run.dir, run.status)
    return run


SCENES: dict[str, tuple[Slow, float, tuple[str, int | None, str | None]]] = {
    **{
        part: (late(2, **{part: 30.0}), 3.0, ("straggler", 2, part))
        for part in ("data", "h2d", "forward", "backward", "optimizer")
    },
    "data of all ranks": (lambda _step, _rank: {"data": 60.0}, 3.0, ("input_bound", None, "data")),
    "the network": (balanced, 120.0, ("communication_bound", None, "communication")),
}


@pytest.mark.parametrize("scene", SCENES)
def test_all_faces_name_the_same_rank_and_cause(scene: str, tmp_path: Path) -> None:
    slow, wire_ms, (kind, rank, cause) = SCENES[scene]
    run = recorded(tmp_path / "runs", slow, wire_ms=wire_ms)
    blocks = StepBlocks()
    live = read_run_record(run, on_step=blocks.apply)
    report = run_report(live.state, run_facts(live))
    assert (report.verdict.kind, report.verdict.rank, report.verdict.cause) == (kind, rank, cause)
    words = report.verdict.text

    lines = [" ".join("".join(text for text, _ in line).split()) for line in report_lines(report, live.state, 100)]
    assert " ".join(words.split()) in " ".join(lines), "the report's text"
    page = report_page(report, run_charts(live.series, live.hardware, blocks, live.metrics))
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["report"]["verdict"]["text"] == words, "the page"
    assert {"kind": kind, "rank": rank}.items() <= data["report"]["findings"][-1].items()

    first = finding_entries(live.state)[0]
    assert (first.message, first.rank, first.cleared) == (words, rank, False), "the console's panel"
    entry = summarize(run, now=0.0)
    (listed,) = (each for each in entry["findings"] if each["kind"] == kind)
    assert (listed["rank"], listed["cause"]) == (rank, cause), "runs --json"
    assert first.short in entry["finding"]
    assert entry["finding"] in "".join(text for text, _ in status_line(live.state)), "the closing line"
    for other in report.ranks:
        assert (kind in other.findings) == (other.rank == rank), "the table of ranks"

    usual = RecordedRun(report=replace(report, findings=()), blocks=blocks, undisturbed=blocks)
    this = RecordedRun(report=report, blocks=blocks, undisturbed=blocks)
    both = [usual, this]
    (limit,) = check_limits(compare(both), both, [parse_condition(f"finding:{kind}")]).limits
    assert (limit.exceeded, limit.text) == (True, words), "compare"
    live.close()
