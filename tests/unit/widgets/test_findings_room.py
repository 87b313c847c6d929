"""A list of findings says as much as it has room for, and what it shows can be pointed at."""

from __future__ import annotations

import pytest

from gputrain_tui.console.widgets.findings import FindingEntry, draw_findings

LATE = FindingEntry(
    key=("straggler", 3, 2.0),
    time=2.0,
    severity="warning",
    cleared=False,
    rank=3,
    where="gpu1 cuda:3",
    message="the others wait 20.1 ms per step for rank 3 (waits for data)",
    evidence=(("late_ms", 20.1),),
    advice="give its loader more workers",
)
OLD = FindingEntry(key=("loss_spike", None, 1.0), time=1.0, severity="info", cleared=True, rank=None, where="",
            message="the loss of all ranks jumped to four times what it was before")  # fmt: skip


def _text(width: int, height: int, *, opened: bool = False) -> list[str]:
    rows = draw_findings([LATE, OLD], width, height, opened=opened)
    return ["".join(text for text, _ in row).rstrip() for row in rows]


@pytest.mark.parametrize("width", [30, 40, 80, 160])
def test_everything_is_said_where_there_is_room_and_no_line_is_too_long(width: int) -> None:
    lines = _text(width, 30)
    said = " ".join(" ".join(lines).split())
    for words in ("(waits for data)", "late ms 20.10", "more workers", "four times what it was before"):
        assert words in said
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [30, 80])
def test_with_little_room_each_finding_keeps_one_line(width: int) -> None:
    lines = _text(width, 3)
    assert "rank 3" in lines[1]
    assert "run" in lines[2]
    assert len(lines) == 3


def test_messages_come_before_evidence_when_only_they_fit() -> None:
    said = " ".join(" ".join(_text(40, 7)).split())
    assert "(waits for data)" in said
    assert "late ms" not in said


def test_what_is_opened_is_shown_from_its_beginning_also_where_it_does_not_fit() -> None:
    lines = _text(40, 4, opened=True)
    assert "rank 3" in lines[1]
    assert len(lines) == 4
