"""Findings that were over with an attempt are not called cleared, wherever they are shown."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import synthetic
from msgspec.structs import replace
from synthetic import BEGIN, write

from gputrain_tui.console.widgets.findings import draw_findings, finding_entries, finding_text
from gputrain_tui.headless.closing_report import finding_lines
from gputrain_tui.headless.progress import ProgressView, paint
from gputrain_tui.headless.report_text import report_lines
from gputrain_tui.report.load_report import read_run_record, run_facts
from gputrain_tui.report.run_report import past_findings, run_report
from gputrain_tui.state import RunState
from gputrain_tui.state.ended_attempts import MAX_EVENTS, EndedAttempts, is_left_standing
from trainer.contract.record import AnyEvent, Failure, Finding, Step


def finding(kind: str, at: float, state: str = "raised", *, rank: int | None = 1) -> Finding:
    values = {"kind": kind, "rank": rank, "state": state, "message": f"{kind} of h1", "step": int(at)}
    return Finding(time=BEGIN + at, **values)  # type: ignore[arg-type]


def step(at: float) -> Step:
    return Step(time=BEGIN + at, rank=0, step=int(at), epoch=1, steps=1, loss=1.0, samples=8, step_ms=100.0)


def over(kind: str, at: float, attempt: int = 1) -> Finding:
    evidence = {} if kind == "requeued" else {"attempt": float(attempt)}
    return Finding(time=BEGIN + at, kind=kind, severity="info", message=f"{kind} {attempt}", evidence=evidence)


WRITTEN_AGAIN = replace(finding("record_incomplete", 11, "cleared"), message="it is written again")
RAISED = finding("straggler", 5)
ENDED = over("restarted", 10)
CASES: dict[str, tuple[Sequence[AnyEvent], str]] = {
    "cleared": ([RAISED, finding("straggler", 8, "cleared")], ""),
    "cleared before the end of its attempt": ([RAISED, finding("straggler", 8, "cleared"), ENDED], ""),
    "over with its attempt": ([RAISED, ENDED, finding("straggler", 11, "cleared")], "attempt 1"),
    "raised and cleared in the second": ([ENDED, finding("straggler", 12), finding("straggler", 15, "cleared")], ""),
    "over with the second": (
        [ENDED, finding("straggler", 12), over("restarted", 14, 2), finding("straggler", 15, "cleared")],
        "attempt 2",
    ),
    "a rank that is gone after its first steps": ([RAISED, ENDED, step(12), finding("straggler", 13, "cleared")],
                                                  "attempt 1"),
    "a silent host": ([finding("host_silent", 5), ENDED, finding("host_silent", 10.1, "cleared")], "attempt 1"),
    "a host that lasted": (
        [finding("cpu_contention", 5), ENDED, step(12), finding("cpu_contention", 13, "cleared")], ""
    ),
    "the record": ([finding("record_incomplete", 5), ENDED, WRITTEN_AGAIN], ""),
    "a job": ([RAISED, over("requeued", 10), finding("straggler", 11, "cleared")], "its job"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_finding_whose_attempt_was_given_up_is_over_with_it(name: str) -> None:
    events, attempt = CASES[name]
    state = RunState(world_size=2)
    state.apply_all([step(1), *events])
    kind = next(each.kind for each in events if isinstance(each, Finding) and each.severity != "info")

    (line,) = finding_lines(state)
    title = "over       with " + attempt if attempt else "cleared    "
    assert paint(line, colour=False).startswith(f"{title}{': ' * bool(attempt)}{kind} of h1"), "the closing report"
    (entry,) = (each for each in finding_entries(state) if each.severity != "info")
    rows = "\n".join("".join(text for text, _ in row) for row in draw_findings([entry], 100, 5))
    shown = f"over with {attempt}" if attempt else "cleared"
    assert (shown in rows, "✓" in rows) == (True, not attempt), "the console's panel"
    assert f"1 {'over' if attempt else 'cleared'}" in rows.splitlines()[0]
    assert f", {shown}:" in finding_text(entry), "its text to paste"
    (told,) = (each for each in past_findings(state) if each.severity != "info")
    assert (told.over_with or "", told.cleared is None) == (attempt, False), "the report"

    stream = io.StringIO()
    state = RunState(world_size=2)
    view = ProgressView(state, stream, live=False, colour=False, width=lambda: 100)
    for event in [step(1), *events]:
        state.apply(event)
        view.update([event])
    cleared = [text for text in stream.getvalue().splitlines() if text.startswith(("cleared", "over"))]
    (text,) = cleared
    assert text.startswith(f"over with {attempt}: " if attempt else "cleared at step "), "the progress lines"


@pytest.mark.parametrize(
    ("kind", "diagnosed", "left"),
    [
        ("host_silent", False, True),
        ("awaits_hosts", False, True),
        ("desync", False, True),
        ("desync", True, False),
        ("non_finite_validation", False, True),
        ("straggler", True, False),
        ("record_incomplete", False, False),
        ("data_changed", False, False),
    ],
)
def test_what_nobody_is_left_to_clear_is_cleared_with_the_attempt(kind: str, diagnosed: bool, left: bool) -> None:
    assert is_left_standing(replace(finding(kind, 5), diagnosed=diagnosed)) == left


def test_the_report_says_until_the_end_of_which_attempt_a_finding_stood(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=20, status="finished")
    for event in (RAISED, ENDED, finding("straggler", 11, "cleared")):
        write(run.dir.run_events, event)
    live = read_run_record(run)
    report = run_report(live.state, run_facts(live))
    lines = ["".join(text for text, _ in line) for line in report_lines(report, live.state, 100)]
    assert "  step 5 to the end of attempt 1  straggler" in lines
    live.close()


def test_a_run_that_is_restarted_for_ever_keeps_a_bounded_memory() -> None:
    attempts = EndedAttempts()
    for number in range(MAX_EVENTS):
        raised = finding("straggler", 3 * number)
        attempts.follow(raised, [], step_time=0.0)
        attempts.follow(over("restarted", 3 * number + 1, number), [raised], step_time=0.0)
        cleared = finding("straggler", 3 * number + 2, "cleared")
        attempts.follow(cleared, [raised], step_time=0.0)
    assert attempts.over_with(cleared) == f"attempt {number}"
    assert attempts.over_with(finding("straggler", 0)) == ""


def test_a_failure_is_over_with_its_attempt_and_stands_in_the_newest_one() -> None:
    state = RunState(world_size=2)
    failures = [Failure(time=BEGIN + at, kind="exception", rank=1, message=f"at {at}") for at in (5, 12, 16)]
    for event in (failures[0], ENDED, failures[1], over("restarted", 14, 2), failures[2]):
        state.apply(event)
    found = [(entry.message, entry.over_with) for entry in finding_entries(state) if entry.severity == "critical"]
    assert found == [("exception: at 16", ""), ("exception: at 12", "attempt 2"), ("exception: at 5", "attempt 1")]
