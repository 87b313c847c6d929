"""A list of findings shows as much as fits, and its entries can be clicked."""

from __future__ import annotations

import pytest
from row_texts import row_text

from gputrain_tui.console.widgets.findings import FindingEntry, draw_findings, finding_entries, finding_text
from gputrain_tui.state import RunState
from trainer.contract.record import Finding, RankState

LATE = FindingEntry(
    key=("straggler", 3, 2.0),
    time=2.0,
    severity="warning",
    cleared=False,
    rank=3,
    where="gpu1 cuda:3",
    message="the others wait 20.1 ms per step for rank 3 (waits for data)",
    evidence=(("excess_ms", 20.1),),
    advice="give its loader more workers",
)
OLD = FindingEntry(key=("loss_spike", None, 1.0), time=1.0, severity="info", cleared=True, rank=None, where="",
            message="the loss of all ranks jumped to four times what it was before")  # fmt: skip


def _text(width: int, height: int, *, opened: bool = False) -> list[str]:
    rows = draw_findings([LATE, OLD], width, height, opened=opened)
    return ["".join(text for text, _ in row).rstrip() for row in rows]


@pytest.mark.parametrize("width", [30, 40, 80, 160])
def test_a_finding_is_shown_whole_where_it_fits_and_no_line_is_too_long(width: int) -> None:
    lines = _text(width, 30)
    text = " ".join(" ".join(lines).split())
    for words in ("(waits for data)", "excess ms 20.10", "more workers", "four times what it was before"):
        assert words in text
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [30, 80])
def test_with_little_room_each_finding_keeps_one_line(width: int) -> None:
    lines = _text(width, 3)
    assert "rank 3" in lines[1]
    assert "run" in lines[2]
    assert len(lines) == 3


def test_messages_come_before_evidence_when_only_they_fit() -> None:
    text = " ".join(" ".join(_text(40, 7)).split())
    assert "(waits for data)" in text
    assert "excess ms" not in text


def test_an_opened_finding_is_shown_from_its_beginning_also_where_it_does_not_fit() -> None:
    lines = _text(40, 4, opened=True)
    assert "rank 3" in lines[1]
    assert len(lines) == 4


def _raised(kind: str, rank: int, time: float, severity: str, **more: object) -> Finding:
    message = f"rank {rank} is far behind the others in each and every step that they make, because of its data loading"
    return Finding(time=time, kind=kind, rank=rank, severity=severity, message=message, **more)  # type: ignore[arg-type]


def _standing_and_cleared() -> RunState:
    state = RunState(world_size=16)
    state.apply(_raised("non_finite", 7, 1.0, "critical"))
    state.apply(_raised("straggler", 5, 2.0, "warning", cause="data", evidence={"excess_ms": 20.0}))
    for rank in range(8):
        state.apply(_raised("loss_spike", rank, 3.0 + rank, "critical"))
        state.apply(_raised("loss_spike", rank, 4.0 + rank, "critical", state="cleared"))
    return state


def test_raised_findings_come_before_cleared_ones_by_severity() -> None:
    entries = finding_entries(_standing_and_cleared())
    assert [entry.rank for entry in entries] == [7, 5, *range(7, -1, -1)]
    assert [entry.cleared for entry in entries] == [False, False, *[True] * 8]


@pytest.mark.parametrize(("width", "height"), [(38, 11), (38, 5), (60, 8), (78, 6), (98, 14), (118, 12)])
def test_a_standing_finding_is_never_cut_before_its_cause(width: int, height: int) -> None:
    rows = draw_findings(finding_entries(_standing_and_cleared()), width, height)
    text = " ".join("".join(text for text, _ in row).strip() for row in rows)
    assert "data loading" in " ".join(text.split())
    assert max(len("".join(text for text, _ in row)) for row in rows) <= width


def test_a_finding_of_several_ranks_is_copied_with_those_of_its_ranks() -> None:
    state = RunState(world_size=4)
    for rank in range(4):
        state.apply(RankState(time=0.0, rank=rank, state="training", node=rank // 2, host=f"node{rank // 2}"))
    for rank in (3, 2):
        longer = f"{60.0 + rank} ms longer than the others in each step (40 % of a step)"
        message = f"rank {rank} takes {longer}, because of its data loading"
        state.apply(
            Finding(
                time=2.0, kind="straggler", rank=rank, host="node1", device=f"cuda:{rank - 2} H200", cause="data",
                message=message, evidence={"excess_ms": 60.0 + rank}, advice="give its loader more workers",
            )
        )  # fmt: skip
    (entry,) = finding_entries(state)
    first, evidence, advice, *members = finding_text(entry).splitlines()
    assert "  warning: 2 ranks of node1 take 62.0 to 63.0 ms longer than the others in each step, because of" in first
    assert evidence == "evidence: excess ms 63, ranks 2"
    assert advice == "advice: give its loader more workers"
    assert [member.split(" takes ")[0] for member in members] == [
        "  rank 2 on node1 cuda:0: rank 2", "  rank 3 on node1 cuda:1: rank 3"
    ]  # fmt: skip
    assert [member.rpartition("(")[2] for member in members] == ["excess ms 62)", "excess ms 63)"]


def test_evidence_is_in_units_that_people_read() -> None:
    state = RunState(world_size=1)
    evidence = {
        "free_bytes": 3.0 * 2**30,
        "growth_bytes_per_hour": 1.5 * 2**30,
        "threads_to_set": 2.0,
        "step_ms": 64.61,
    }
    state.apply(Finding(time=2.0, kind="memory_creep", rank=0, message="it grows", evidence=evidence))
    (entry,) = finding_entries(state)
    assert "evidence: free 3 GiB, growth per hour 1.5 GiB, threads to set 2, step ms 64.61" in finding_text(entry)


STALLED = FindingEntry(
    key=("stalled", 1, 3.0),
    time=3.0,
    severity="critical",
    cleared=False,
    rank=1,
    where="gpu1 cuda:1",
    message=(
        "rank 1 on gpu1 has done no step for more than 10 s, after step 60, and the others wait for it; rank 1 is "
        "between its batch and its forward pass (train_with_a_long_name.py:7 in augment), and its process sleeps in "
        "kernel function hrtimer_nanosleep; its last collectives are all_reduce 63 of [4160], all_reduce 64 of [4160]"
    ),
    short="rank 1 stalled: between batch and forward",
    evidence=(("silent_s", 10.05), ("last_step", 60.0)),
    advice="K on the rank's page prints its Python stack",
)


@pytest.mark.parametrize(("width", "height"), [(78, 8), (78, 7), (38, 12), (38, 9)])
@pytest.mark.parametrize("focused", [True, False])
def test_a_message_that_is_too_long_for_its_place_keeps_the_line_of_the_users_code(
    width: int, height: int, focused: bool
) -> None:
    rows = draw_findings([STALLED, LATE], width, height, focused=focused)
    text = " ".join(" ".join("".join(text for text, _ in row) for row in rows).split())
    assert "rank 1 " in text
    assert "(train_with_a_long_name.py:7" in text
    assert "rank 3" in text or focused


@pytest.mark.parametrize(("width", "height", "cut"), [(53, 6, True), (53, 40, False), (198, 8, False), (100, 3, True)])
def test_the_title_names_the_key_that_shows_what_was_cut(width: int, height: int, cut: bool) -> None:
    title = "".join(text for text, _ in draw_findings([STALLED, LATE], width, height)[0])
    assert ("f f shows all" in title) == cut
    assert "f f" not in "".join(text for text, _ in draw_findings([STALLED, LATE], width, height, focused=True)[0])


@pytest.mark.parametrize(("width", "height"), [(78, 6), (38, 8)])
def test_an_opened_finding_that_is_too_long_shows_its_evidence(width: int, height: int) -> None:
    rows = draw_findings([STALLED, LATE], width, height, opened=True, focused=True)
    text = " ".join(" ".join("".join(text for text, _ in row) for row in rows).split())
    for words in ("rank 1 stalled", "silent s 10.05", "prints its Python stack"):
        assert words in text


@pytest.mark.parametrize(("height", "offered"), [(6, True), (30, False)])
def test_the_title_offers_the_evidence_only_where_it_is_not_shown_yet(height: int, offered: bool) -> None:
    rows = draw_findings([STALLED, LATE], 78, height, focused=True)
    assert ("⏎ evidence and advice" in row_text(rows[0])) == offered
    assert any("silent s" in row_text(row).replace("\xa0", " ") for row in rows) != offered
