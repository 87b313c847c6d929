"""Who asks what is wrong with a run hears the same rank and cause from panel, table, list, report, page and compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from msgspec.structs import replace
from test_diagnosis import SimulatedRun, Slow, balanced, late

from gputrain_tui.console.widgets.findings import finding_entries
from gputrain_tui.console.widgets.run_header import run_condition
from gputrain_tui.diagnosis import HISTORY
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
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import marking
from trainer.contract.record import AnyEvent, Finding, NodeSample, RankSample, RankState, Step
from trainer.contract.record.downsampled import DownsampledBlock

RANKS = 4
Simulate = Callable[[SimulatedRun], object]


class KeepingState(RunState):
    """A state that keeps its events."""

    def __init__(self, **named: int) -> None:
        super().__init__(**named)
        self.applied: list[AnyEvent | DownsampledBlock] = []

    def apply(self, event: AnyEvent | DownsampledBlock) -> None:
        super().apply(event)
        self.applied.append(event)


def recorded(folder: Path, simulate: Simulate, *, wire_ms: float) -> Run:
    """Return a run that is over, with the record and the status that its ranks and its supervisor wrote."""
    simulated = SimulatedRun(RANKS, wire_ms=wire_ms)
    hosts = [(view.node, view.host) for view in simulated.state.ranks.values()]
    simulated.state = state = KeepingState(world_size=RANKS, history=HISTORY)
    for rank, (node, host) in enumerate(hosts):
        state.apply(RankState(time=simulated.now, rank=rank, state="training", node=node, host=host, device="cpu"))
    simulate(simulated)
    run = synthetic.run(folder, ranks_per_node=RANKS, steps=0, status="finished")
    for event in state.applied:
        if isinstance(event, Step):
            synthetic.write(run.dir.rank_events(event.rank), event)
        elif isinstance(event, NodeSample):
            synthetic.write(run.dir.node_events(event.node), event)
        elif isinstance(event, Finding):
            synthetic.write(run.dir.run_events, event)
    run.status.findings = marking(roll_up(simulated.state.findings.values(), simulated.state.ranks))
    write_status(run.dir, run.status)
    return run


def steps(slow: Slow) -> Simulate:
    return lambda run: run.steps(120, slow)


def drifting(step: int, rank: int) -> dict[str, float]:
    """Rank 2 takes longer from step to step."""
    return {"backward": 0.5 * step} if rank == 2 else {}


def growing(run: SimulatedRun) -> None:
    """Rank 2's process takes 50 MiB more each second, of 16 GiB that its host has left."""
    for second in range(40):
        run.steps(3, lambda _step, _rank: {"forward": 300.0})
        used = (4 << 30) + second * (50 << 20)
        ranks = [RankSample(rank=2, rss_bytes=used)]
        memory = {"memory_used_bytes": used + (20 << 30), "memory_total_bytes": 40 << 30}
        run.state.apply(NodeSample(time=run.now, node=1, host="node1", ranks=ranks, **memory))


def hanging_after_it_was_slow(run: SimulatedRun) -> None:
    """Rank 2's data is late in each step, which is critical as well; then rank 1 hangs."""
    run.steps(120, late(2, data=30.0))
    (slow,) = run.state.findings.values()
    assert (slow.kind, slow.severity) == ("straggler", "critical")
    event = Finding(time=run.now, kind="stalled", severity="critical", rank=1, cause="other", message="rank 1 hangs")
    run.state.apply(event)


SCENES: dict[str, tuple[Simulate, float, tuple[str, int | None, str | None]]] = {
    **{
        part: (steps(late(2, **{part: 30.0})), 3.0, ("straggler", 2, part))
        for part in ("data", "h2d", "forward", "backward", "optimizer")
    },
    "drift": (steps(drifting), 3.0, ("straggler", 2, "backward")),
    "data of all ranks": (steps(lambda _step, _rank: {"data": 60.0}), 3.0, ("input_bound", None, "data")),
    "the network": (steps(balanced), 120.0, ("communication_bound", None, "communication")),
    "memory": (growing, 3.0, ("memory_creep", 2, "process")),
    "a stall after another finding": (hanging_after_it_was_slow, 3.0, ("stalled", 1, "other")),
}


@pytest.mark.parametrize("scene", SCENES)
def test_all_faces_name_the_same_rank_and_cause(scene: str, tmp_path: Path) -> None:
    simulate, wire_ms, (kind, rank, cause) = SCENES[scene]
    run = recorded(tmp_path / "runs", simulate, wire_ms=wire_ms)
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
    assert entry["finding"].startswith(first.short)
    assert entry["findings"][0] == listed
    assert first.short in "".join(text for text, _ in run_condition(live.state)[0]), "the console's header"
    assert entry["finding"] in "".join(text for text, _ in status_line(live.state)), "the closing line"
    for other in report.ranks:
        assert (kind in other.findings) == (other.rank == rank), "the table of ranks"

    sound = replace(report, findings=(), verdict=replace(report.verdict, kind="compute"))
    usual = RecordedRun(report=sound, blocks=blocks, undisturbed=blocks)
    this = RecordedRun(report=report, blocks=blocks, undisturbed=blocks)
    both = [usual, this]
    (limit,) = check_limits(compare(both), both, [parse_condition(f"finding:{kind}")]).limits
    assert (limit.exceeded, limit.text) == (True, words), "compare"
    live.close()


ALL_RANKS = {
    "forward": ("compute", "compute-bound: forward and backward take "),
    "backward": ("compute", "compute-bound: forward and backward take "),
    "optimizer": ("optimizer", "optimizer-bound: the optimizer takes "),
}


@pytest.mark.parametrize("part", ALL_RANKS)
def test_what_slows_all_ranks_alike_is_the_verdict_and_nobodys_finding(part: str, tmp_path: Path) -> None:
    kind, words = ALL_RANKS[part]
    run = recorded(tmp_path / "runs", steps(lambda _step, _rank: {part: 60.0}), wire_ms=3.0)
    blocks = StepBlocks()
    live = read_run_record(run, on_step=blocks.apply)
    report = run_report(live.state, run_facts(live))
    assert (report.verdict.kind, report.verdict.rank, report.verdict.is_problem) == (kind, None, False)
    assert report.verdict.text.startswith(words)
    assert max(report.parts, key=lambda each: each.ms).name == part
    lines = ["".join(text for text, _ in line) for line in report_lines(report, live.state, 200)]
    assert report.verdict.text in lines, "the report's text"
    page = report_page(report, run_charts(live.series, live.hardware, blocks, live.metrics))
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["report"]["verdict"]["text"] == report.verdict.text, "the page"
    assert finding_entries(live.state) == [], "the console's panel"
    assert summarize(run, now=0.0)["findings"] == [], "runs --json"
    assert "with" not in "".join(text for text, _ in status_line(live.state)), "the closing line"
    live.close()
