"""Panel of findings and failures with evidence and advice; those that stand come before cleared ones."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import MOVE_KEYS, Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, format_value, row_cells, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.run_condition import MARKS
from gputrain_tui.diagnosis.roll_up import newest_findings_with_members
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import failure_summary, failure_words, finding_summary, urgency
from gputrain_tui.tables import printable, size
from trainer.contract.record import Failure, Finding

NARROW_CELLS = 56
"""Cells of a panel below which a message begins on a line of its own, if the lines suffice."""
DETAIL_INDENT_CELLS = 3
"""Cells before a line below the first one of an entry."""
NO_MORE: Row = [("   ", "base"), ("no further evidence was recorded", "dim")]


@dataclass(frozen=True, kw_only=True)
class FindingEntry:
    """One line of the list."""

    key: tuple[str, int | None, float]
    """Kind, rank and time, which identify the entry."""
    time: float
    """Unix seconds."""
    severity: str
    cleared: bool
    rank: int | None
    """The rank; for stragglers of a node the most delayed one; None: the whole run."""
    where: str
    """Host and device."""
    message: str
    ranks: int = 1
    """Number of ranks: more than one for the stragglers of a node."""
    short: str = ""
    """Rank, problem and cause in a few words, shown where the message does not fit."""
    evidence: Sequence[tuple[str, float]] = ()
    advice: str = ""
    last_line: str = ""
    """Last line of the process's traceback, or its message."""
    members: Sequence[FindingEntry] = ()
    """Findings that were rolled up into this one, by rank."""


def finding_entries(state: RunState) -> list[FindingEntry]:
    """Return findings and failures, each once: standing ones by severity, then cleared ones; the newest first."""
    cause = state.root_cause
    others = [failure for failure in state.failures if failure != cause]
    consequences = [failure for failure in others if cause is not None and failure.kind == "lost_peer"]
    found: list[FindingEntry] = [_failed(cause)] if cause is not None else []
    found += [_failed(failure) for failure in others if failure not in consequences]
    if cause is not None and consequences:
        found.append(_lost(cause, consequences))
    found += [
        _raised(finding, members, cleared=not stands)
        for finding, stands, members in newest_findings_with_members(state)
    ]
    return sorted(found, key=_order)


def _order(entry: FindingEntry) -> tuple[bool, int, float, int]:
    rank = entry.rank if entry.rank is not None else -1
    return entry.cleared, 0 if entry.cleared else urgency(entry.severity), -entry.time, rank


def _raised(finding: Finding, members: Sequence[Finding] = (), *, cleared: bool) -> FindingEntry:
    return FindingEntry(
        key=(finding.kind, finding.rank, finding.time),
        time=finding.time,
        severity=finding.severity,
        cleared=cleared,
        rank=finding.rank,
        where=" ".join(filter(None, (finding.host, (finding.device or "").partition(" ")[0]))),
        message=printable(finding.message or finding.kind.replace("_", " ")),
        ranks=int(finding.evidence.get("ranks", 1)) if finding.kind == "straggler" else 1,
        short=printable(finding_summary(finding)),
        evidence=tuple(finding.evidence.items()),
        advice=printable(finding.advice),
        members=sorted((_raised(member, cleared=cleared) for member in members), key=lambda entry: entry.rank or 0),
    )


def _failed(failure: Failure) -> FindingEntry:
    at = f" at step {failure.step:,}" if failure.step is not None else ""
    return FindingEntry(
        key=(failure.kind, failure.rank, failure.time),
        time=failure.time,
        severity="critical",
        cleared=False,
        rank=failure.rank,
        where=failure.host or "",
        message=f"{failure_words(failure)}{at}: {printable(failure.message)}",
        short=failure_summary(failure),
        last_line=printable((failure.traceback or "").strip().splitlines()[-1]) if failure.traceback else "",
    )


def _lost(cause: Failure, consequences: Sequence[Failure]) -> FindingEntry:
    """Return one entry for all ranks that lost their connection when a peer failed."""
    count = len({failure.rank for failure in consequences})
    peer = f"rank {cause.rank}" if cause.rank is not None else "a peer"
    return FindingEntry(
        key=("lost_peer", cause.rank, consequences[0].time),
        time=max(failure.time for failure in consequences),
        severity="info",
        cleared=False,
        rank=consequences[0].rank if count == 1 else None,
        where="",
        message=f"{count:,} rank{'s' * (count != 1)} lost the connection to {peer}",
        last_line=printable(consequences[0].message),
    )


def draw_findings(
    found: Sequence[FindingEntry],
    width: int,
    height: int,
    *,
    cursor: int = 0,
    opened: bool = False,
    focused: bool = False,
    watching: bool = True,
) -> list[Row]:
    """Return the list as ``height`` rows of ``width`` cells; ``opened``: with details of the entry under the cursor."""
    raised = [entry for entry in found if not entry.cleared]
    left: Row = [("findings", "title")]
    if found:
        left += [(" ", "base"), (f"{len(raised):,}", "bright")]
        if len(raised) < len(found):
            left.append((f"  {len(found) - len(raised):,} cleared", "dim"))
    rights: list[Row] = [[("⏎ evidence and advice", "dim")]] if found and focused else []
    rows = [fit_row(title_row(width, left, rights), width)]
    if not found:
        text = "nothing to report: no rank stands out" if watching else "nothing was found"
        return rows + centred_text(width, height - 1, [text])
    rows += [fit_row(row, width) for _, row in _shown(found, width, height - 1, cursor, opened=opened, focused=focused)]
    return rows + [fit_row([], width) for _ in range(height - len(rows))]


def _shown(
    found: Sequence[FindingEntry], width: int, height: int, cursor: int, *, opened: bool, focused: bool
) -> list[tuple[int, Row]]:
    """Return the lines below the title, as many as fit, each with the index of its entry.

    The message under the cursor comes first, as long as the others keep a line each (with the focus they need not),
    then the other messages in order, then the details. An opened entry's details come before its message.
    """
    details = _details(found[cursor], width) or ([NO_MORE] if opened else [])
    standing = sum(not entry.cleared for index, entry in enumerate(found) if index != cursor)
    overview = len(found) - 1 if len(found) <= height else standing
    kept = len(details) if opened else 0 if focused else overview
    needs = [len(_line(entry, width)) for entry in found]
    lines = [1] * len(found)
    lines[cursor] = max(min(needs[cursor], height - kept), 1)
    free = height - sum(lines) - (len(details) if opened else 0)
    for index, need in enumerate(needs):
        if index != cursor and need - 1 <= free:
            free -= need - 1
            lines[index] = need
    rows: list[tuple[int, Row]] = []
    for index, entry in enumerate(found):
        at_cursor = index == cursor
        rows += [(index, row) for row in _line(entry, width, marked=at_cursor and focused, most=lines[index])]
        if at_cursor and (opened or len(details) <= free):
            rows += [(index, row) for row in details]
    first = next(i for i, (index, _) in enumerate(rows) if index == cursor)
    last = max(i for i, (index, _) in enumerate(rows) if index == cursor)
    top = min(max(0, last - height + 1), first)
    return rows[top : top + height]


def _line(entry: FindingEntry, width: int, *, marked: bool = False, most: int | None = None) -> list[Row]:
    """Return an entry with its whole message; if that takes more than ``most`` lines, with its summary and a part."""
    mark, role = MARKS.get(entry.severity, MARKS["warning"])
    at = time.strftime("%H:%M:%S", time.localtime(entry.time))
    who = f"rank {entry.rank}" if entry.rank is not None else "run"
    who = f"{entry.ranks:,} ranks" if entry.ranks > 1 else who
    text_role = "dim" if entry.cleared else "bright"
    cleared: Row = [("  cleared", "dim")] if entry.cleared else []
    marks: Row = [
        ("▸" if marked else " ", "accent"),
        (f"{'✓' if entry.cleared else mark} ", "dim" if entry.cleared else role),
    ]
    when: Row = [(f"{at}  ", "dim")]
    if width < NARROW_CELLS:
        head: Row = [*marks, *when, (who, text_role), *cleared]
        message = _indented(entry.message, text_role, width, DETAIL_INDENT_CELLS)
        if most is None or len(message) < most:
            return [head, *message]
        return _cut([[*marks, (entry.short, text_role), *cleared] if entry.short else head, *message], most)
    message_indent_cells = 23  # cells of mark, time and rank before a message on the same line
    room = width - message_indent_cells - 2 - (9 if entry.cleared else 0)
    texts = _wrapped(entry.message, room)
    is_cut = most is not None and len(texts) > most
    if is_cut:
        texts.insert(0, entry.short if 0 < len(entry.short) <= room else f"{texts.pop(0)} …")
    head = [*marks, *when, (who.ljust(9), text_role), (" ", "base"), (texts[0], text_role)]
    rows = [head, *([(" " * message_indent_cells, "base"), (line, text_role)] for line in texts[1:])]
    if most is not None and is_cut:
        rows = _cut(rows, most)
    rows[-1] += cleared
    if entry.where and row_cells(head) + len(entry.where) + 3 <= width:
        head.append((f"  {printable(entry.where)}", "dim"))
    return rows


def _cut(rows: list[Row], most: int) -> list[Row]:
    """Return the first ``most`` rows; the last of several ends with an ellipsis."""
    rows = rows[:most]
    if most > 1:
        rows[-1] = [*rows[-1][:-1], (f"{rows[-1][-1][0]} …", rows[-1][-1][1])]
    return rows


def _details(entry: FindingEntry, width: int) -> list[Row]:
    """Return evidence and advice of a finding."""
    # No-break spaces keep a figure and its name on one line.
    figures = "   ".join(figure.replace(" ", "\xa0") for figure in _figures(entry))
    rows: list[Row] = []
    for label, text, role in (
        ("evidence", figures, "bright"),
        ("said", entry.last_line, "dim"),
        ("advice", entry.advice, "accent"),
    ):
        if text and width < NARROW_CELLS:
            rows += _indented(text, role, width, DETAIL_INDENT_CELLS)
        elif text:
            for number, line in enumerate(_wrapped(text, max(width - DETAIL_INDENT_CELLS - 10, 20))):
                rows.append(
                    [(" " * DETAIL_INDENT_CELLS, "base"), (("" if number else label).ljust(10), "dim"), (line, role)]
                )
    return rows


def finding_text(entry: FindingEntry) -> str:
    """Return an entry as text to paste: time, severity, rank, place, message, evidence, last line, advice, members."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    about = entry.message if entry.members else _about(entry)
    lines = [f"{at}  {entry.severity}{', cleared' if entry.cleared else ''}: {about}"]
    for label, text in (("evidence", ", ".join(_figures(entry))), ("said", entry.last_line), ("advice", entry.advice)):
        lines += [f"{label}: {text}"] if text else []
    for member in entry.members:
        figures = ", ".join(_figures(member))
        lines.append(f"  {_about(member)}" + (f" ({figures})" if figures else ""))
    return "\n".join(lines)


def _about(entry: FindingEntry) -> str:
    """Return rank, place and message of an entry."""
    who = f"rank {entry.rank}" if entry.rank is not None else "run"
    return f"{who}{f' on {printable(entry.where)}' if entry.where else ''}: {entry.message}"


def _figures(entry: FindingEntry) -> list[str]:
    """Return the names and numbers of the evidence: sizes in binary units, whole numbers without decimals."""
    figures = []
    for name, value in entry.evidence:
        words = name.replace("_bytes", "").replace("_", " ")
        if "_bytes" in name:
            figures.append(f"{words} {size(int(value))}")
        else:
            figures.append(f"{words} {value:,.0f}" if value.is_integer() else f"{words} {format_value(value)}")
    return figures


def _indented(text: str, role: str, width: int, indent: int) -> list[Row]:
    return [[(" " * indent, "base"), (line, role)] for line in _wrapped(text, width - indent)]


def _wrapped(text: str, room: int) -> list[str]:
    return [line.replace("\xa0", " ") for line in textwrap.wrap(text, max(room, 8))] or [""]


class Findings(Panel, can_focus=True):
    """List of the findings and failures."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *MOVE_KEYS[:2],
        *MOVE_KEYS[4:],
        Binding("enter", "open", "Evidence and advice", show=False),
        *bindings("text"),
    ]
    PLACE = "text"
    """Name of the panel in the action table."""

    @dataclass
    class RankChosen(Message):
        """A finding about a rank was opened."""

        rank: int

    class Overflowed(Message):
        """An opened finding is longer than the panel."""

    _key: tuple[str, int | None, float] | None = None
    """Key of the entry under the cursor, which stays on it when newer ones come."""
    _opened = False

    def seen_version(self) -> object:
        """Return a value that changes with the findings, the failures and the end of the run."""
        state = self.live.state
        past = state.past_findings
        return len(past), past[-1].time if past else 0.0, len(state.findings), len(state.failures), self.live.over

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the list."""
        found = finding_entries(self.live.state)
        return draw_findings(
            found,
            width,
            height,
            cursor=self._index(found),
            opened=self._opened,
            focused=self.has_focus,
            watching=not self.live.over,
        )

    def action_move(self, lines: int) -> None:
        """Move the cursor."""
        found = finding_entries(self.live.state)
        if found:
            self._opened = False
            self._put_cursor(found, self._index(found) + lines)

    def action_edge(self, side: int) -> None:
        """Move the cursor to the first or the last finding."""
        self.action_move(side * len(finding_entries(self.live.state)))

    def copyable(self) -> Copyable | None:
        """Return the finding under the cursor, with evidence and advice."""
        found = finding_entries(self.live.state)
        if not found:
            return None
        entry = found[self._index(found)]
        return Copyable(finding_text(entry), "the finding")

    def action_open(self) -> None:
        """Open or close the finding under the cursor; opening selects its rank."""
        found = finding_entries(self.live.state)
        if not found:
            return
        entry = found[self._index(found)]
        self._key, self._opened = entry.key, not self._opened
        self.redraw()
        if self._opened and entry.rank is not None:
            self.post_message(self.RankChosen(entry.rank))
        width, height = self.size
        if self._opened and len(_line(entry, width)) + len(_details(entry, width)) >= height:
            self.post_message(self.Overflowed())

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the clicked finding; a click on the cursor's one opens or closes it."""
        _, y = event.get_content_offset_capture(self)
        found = finding_entries(self.live.state)
        cursor = self._index(found)
        shown = _shown(
            found, self.size.width, self.size.height - 1, cursor, opened=self._opened, focused=self.has_focus
        )
        clicked = shown[y - 1][0] if 1 <= y <= len(shown) else cursor
        if clicked == cursor:
            self.action_open()
        else:
            self._opened = False
            self._put_cursor(found, clicked)

    def _index(self, found: Sequence[FindingEntry]) -> int:
        """Return the index of the entry under the cursor; at first 0, the most urgent one."""
        return next((i for i, entry in enumerate(found) if entry.key == self._key), 0)

    def _put_cursor(self, found: Sequence[FindingEntry], index: int) -> None:
        self._key = found[min(max(index, 0), len(found) - 1)].key
        self.redraw()
