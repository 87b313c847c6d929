from __future__ import annotations

import re

import pytest
from row_texts import row_text

from gputrain_tui.console.widgets.drawing import row_cells
from gputrain_tui.console.widgets.findings import finding_entries
from gputrain_tui.console.widgets.run_header import LEAST_STEPS, RunHeading, draw_header, run_condition
from gputrain_tui.diagnosis import KINDS
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import RunFigures
from gputrain_tui.state.standstill import Standstill
from trainer.contract.record import Failure, Finding, Step, Validation


def state_with(*findings: Finding, step: int = LEAST_STEPS) -> RunState:
    state = RunState(world_size=2)
    for rank in (0, 1):
        state.apply(Step(time=1.0, rank=rank, step=step, epoch=1, steps=1, loss=1.0, samples=8))
    for finding in findings:
        state.apply(finding)
    return state


def late(rank: int, late_ms: float, **more: str) -> Finding:
    return Finding(time=2.0, kind="straggler", rank=rank, evidence={"excess_ms": late_ms}, **more)  # type: ignore[arg-type]


def condition_rows(*findings: Finding, step: int = LEAST_STEPS) -> list[str]:
    return [row_text(form) for form in run_condition(state_with(*findings, step=step))]


def test_no_findings_is_shown_after_the_least_number_of_steps() -> None:
    assert condition_rows() == ["✓ no findings"]
    assert condition_rows(step=LEAST_STEPS - 1) == []


def test_the_latest_rank_is_named_with_its_cause() -> None:
    found = condition_rows(late(0, 12.0), late(1, 148.7, cause="data"))
    assert found == ["▲ rank 1 slow +149 ms: data loading  +1 more", "▲ rank 1 slow +149 ms: data loading",
                     "▲ rank 1 slow +149 ms"]  # fmt: skip


def test_critical_findings_come_first() -> None:
    assert condition_rows(late(0, 500.0), Finding(time=3.0, kind="non_finite", rank=1, severity="critical"))[
        1
    ].startswith("✗ rank 1")


def test_ranks_whose_loss_is_nan_are_all_named() -> None:
    found = Finding(time=3.0, kind="non_finite", rank=0, ranks=[0, 1], severity="critical", message="NaN")
    assert condition_rows(found) == ["✗ ranks 0, 1 NaN or infinite"]
    (entry,) = finding_entries(state_with(found))
    assert (entry.ranks, entry.short) == (2, "ranks 0, 1 NaN or infinite")


@pytest.mark.parametrize("status", ["running", "finished"])
def test_nan_on_many_ranks_is_in_the_header_of_80_cells(status: str) -> None:
    found = Finding(time=3.0, kind="non_finite", rank=0, ranks=list(range(16)), severity="critical", step=201)
    head = RunHeading(
        status=status, name="bert", id="i", world_size=16, hosts=1, summary=RunFigures(), elapsed_s=65.0,
        condition=run_condition(state_with(found), status),
    )  # fmt: skip
    text = row_text(draw_header(head, 80, 2)[0])
    assert "NaN" in text
    assert "ranks 0 to 15" in text


def test_a_long_name_leaves_space_for_the_finding_and_the_elapsed_time() -> None:
    head = RunHeading(
        status="running", name="long-" * 20, id="i", world_size=2, hosts=1, summary=RunFigures(), elapsed_s=65.0,
        condition=[[("✗ rank 1 stalled", "error")]],
    )  # fmt: skip
    for width in (80, 120):
        text = row_text(draw_header(head, width, 2)[0])
        assert ("…   " in text and "   ✗ rank 1 stalled" in text, text.endswith(" 1:05 ")) == (True, True), text


def test_a_gap_of_the_record_comes_before_figures_of_its_recorded_part() -> None:
    gap = Finding(time=3.0, kind="record_incomplete")
    assert condition_rows(late(0, 500.0), gap)[0] == "▲ the record is incomplete  +1 more"


def test_cleared_findings_are_not_shown() -> None:
    over = Finding(time=3.0, kind="straggler", rank=1, state="cleared")
    assert condition_rows(late(1, 20.0), over) == ["✓ no findings"]


@pytest.mark.parametrize("is_long", [False, True])
def test_no_run_is_well_that_makes_no_step(is_long: bool) -> None:
    forms = run_condition(state_with(), standstill=Standstill(38.0, is_long))
    assert bool(forms) != is_long
    head = RunHeading(
        status="running", name="bert", id="id", world_size=2, hosts=1, total=100, elapsed_s=60.0, eta_s=50.0,
        summary=RunFigures(step=42, epoch=1, loss=1.0, samples_per_s=500.0, sync_share=0.5),
        standstill=Standstill(38.0, is_long), condition=forms,
    )  # fmt: skip
    text = "\n".join(map(row_text, draw_header(head, 120, 2)))
    assert "no step for 38 s" in text
    for words in ("left", "samples/s", "sync wait", "no findings"):
        assert (words in text) != is_long


@pytest.mark.parametrize(
    ("world_size", "compute", "sync"), [(2, 0.574, 0.364), (2, 0.005, 0.005), (2, 0.985, 0.025), (1, 0.866, None)]
)
def test_the_shares_of_the_header_add_up(world_size: int, compute: float, sync: float | None) -> None:
    figures = RunFigures(step=42, epoch=1, loss=1.0, samples_per_s=500.0, compute_share=compute, sync_share=sync)
    head = RunHeading(status="running", name="bert", id="id", world_size=world_size, hosts=1, summary=figures)
    shares = re.findall(r"(compute|sync wait|rest) +([0-9]+)%", row_text(draw_header(head, 160, 2)[1]))
    assert [name for name, _ in shares] == ["compute", *["sync wait"] * (world_size > 1), "rest"]
    assert sum(int(percent) for _, percent in shares) == 100
    assert "rest" not in row_text(draw_header(head, 60, 2)[1])


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_the_verdict_stays_when_the_run_has_ended(status: str) -> None:
    state = state_with(late(1, 20.0, cause="data"))
    if status == "failed":
        state.apply(Failure(time=3.0, kind="out_of_memory", rank=1, step=42, in_step=42, message="CUDA out of memory"))
    expected = "rank 1 out of memory in step 42" if status == "failed" else "▲ rank 1 slow +20 ms: data loading"
    forms = run_condition(state, status)
    assert row_text(forms[0]) == expected
    head = RunHeading(status=status, name="bert", id="id", world_size=2, hosts=1, summary=RunFigures(),
                      elapsed_s=60.0, condition=forms, note="4 History, r resumes from its checkpoint")  # fmt: skip
    assert expected in row_text(draw_header(head, 80, 2)[0])


@pytest.mark.parametrize("kind", sorted(KINDS | {"desync", "something_new"}))
def test_every_kind_of_finding_has_its_few_words(kind: str) -> None:
    (*_, shortest) = condition_rows(Finding(time=2.0, kind=kind))
    assert 4 < len(shortest) < 30
    assert "_" not in shortest


@pytest.mark.parametrize("width", range(1, 140, 3))
def test_the_header_has_the_verdict_before_the_clock_and_the_names(width: int) -> None:
    head = RunHeading(
        status="running", name="bert", id="20270115-080000-bert", world_size=24, hosts=3, summary=RunFigures(),
        elapsed_s=60.0, eta_s=5000.0, condition=run_condition(state_with(late(1, 20.0, cause="data"))),
    )  # fmt: skip
    row = draw_header(head, width, 2)[0]
    assert row_cells(row) == width
    text = row_text(row)
    if width >= 64:
        assert "rank 1 slow +20 ms" in text
        assert "left 1:23:20" in text
    if "on 3 hosts" in text or "elapsed" in text:
        assert "slow +20 ms: data loading" in text or width < 64


@pytest.mark.parametrize("steps", [0, 42])
def test_the_header_names_the_tested_weights(steps: int) -> None:
    head = RunHeading(
        status="finished",
        name="demo",
        id="20261121-demo",
        world_size=2,
        hosts=1,
        summary=RunFigures(step=steps, epoch=1, loss=1.0) if steps else RunFigures(),
        tested=Validation(
            time=1.0, step=42, epoch=6, split="test", loss=0.5, metrics={"accuracy": 0.9}, weights_step=7
        ),
    )
    figures = row_text(draw_header(head, 120, 2)[1])
    assert ("test 0.5000 (weights of step 7)" if steps else "test (weights of step 7)  loss 0.5000  acc") in figures
