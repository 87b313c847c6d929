"""Panel of findings and failures with evidence and advice; those that stand come before cleared ones."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import MOVE_KEYS, Copyable
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_rows, format_value, row_cells, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.run_header import SEVERITY_SIGNS
from gputrain_tui.diagnosis.roll_up import newest_findings_with_members
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import failure_step, failure_summary, failure_words, finding_summary, urgency
from gputrain_tui.state.share_changes import change_text, shares_text
from gputrain_tui.tables import printable, size
from trainer.contract.record import Failure, Finding, ShareChange

NARROW_CELLS = 56
"""Cells of a panel below which a message begins on a line of its own, if the lines suffice."""
FAILURE = "failure"
"""First part of the key of a failure, which comes before any finding."""
SHARES = "shares"
"""First part of the key of a change of the ranks' shares, which is listed and is no finding."""
DETAIL_INDENT_CELLS = 3
"""Cells before a line below the first one of an entry."""


@dataclass(frozen=True, kw_only=True)
class FindingEntry:
    """One line of the list."""

    key: tuple[str, int | None, float]
    time: float
    """Unix seconds."""
    severity: str
    rank: int | None
    """The rank; for stragglers of a node the most delayed one; None: the whole run."""
    message: str
    cleared: bool = False
    over_with: str = ""
    """The attempt that it was over with, where it is cleared for no other reason."""
    where: str = ""
    """Host and device."""
    ranks: int = 1
    short: str = ""
    """Rank, problem and cause in a few words, shown where the message does not fit."""
    evidence: Sequence[tuple[str, float]] = ()
    advice: str = ""
    last_line: str = ""
    """Last line of the process's traceback, or its message."""
    members: Sequence[FindingEntry] = ()
    """Findings that were rolled up into this one, by rank."""


def finding_entries(state: RunState) -> list[FindingEntry]:
    """Return findings, failures and changes of the ranks' shares, each once.

    Failures come first, then standing findings by urgency, then cleared ones; of equals the newest first.
    """
    cause = state.root_cause
    others = [failure for failure in state.failures if failure != cause]
    lost = [failure for failure in others if cause is not None and failure.kind == "lost_peer"]
    entries = [_failed(cause)] if cause is not None else []
    entries += [_failed(each, state.ended_attempts.failed_in(each.time)) for each in others if each not in lost]
    if cause is not None and lost:
        entries.append(_lost(cause, lost))
    for finding, stands, members in newest_findings_with_members(state):
        over_with = "" if stands else state.ended_attempts.over_with(finding)
        entries.append(_raised(finding, members, cleared=not stands, over_with=over_with))
    most_changes = 5  # the newest
    changed = [change for change in state.shares.changes if change.cause != "start"]
    entries += [_changed(change) for change in changed[-most_changes:]]
    return sorted(entries, key=_order)


def _order(entry: FindingEntry) -> tuple[bool, tuple[int, ...], float, int]:
    kind = entry.key[0]
    order = () if entry.cleared or kind == FAILURE else urgency(kind, entry.severity)
    return entry.cleared, order, -entry.time, entry.rank if entry.rank is not None else -1


def _raised(finding: Finding, members: Sequence[Finding] = (), *, cleared: bool, over_with: str = "") -> FindingEntry:
    return FindingEntry(
        key=(finding.kind, finding.rank, finding.time),
        time=finding.time,
        severity=finding.severity,
        cleared=cleared,
        over_with=over_with,
        rank=finding.rank,
        where=" ".join(filter(None, (finding.host, (finding.device or "").partition(" ")[0]))),
        message=printable(finding.message or finding.kind.replace("_", " ")),
        ranks=_rank_count(finding),
        short=printable(finding_summary(finding)),
        evidence=tuple(finding.evidence.items()),
        advice=printable(finding.advice),
        members=sorted((_raised(member, cleared=cleared) for member in members), key=lambda entry: entry.rank or 0),
    )


def _rank_count(finding: Finding) -> int:
    """Return the number of ranks that a finding is about."""
    if finding.kind == "non_finite":
        return max(len(finding.ranks), 1)
    return int(finding.evidence.get("ranks", 1)) if finding.kind == "straggler" else 1


def _failed(failure: Failure, over_with: str = "") -> FindingEntry:
    kind = "" if failure.kind == "signal" else failure_words(failure)  # its message names it
    lead = f"{kind}{failure_step(failure)}".strip()
    return FindingEntry(
        key=(FAILURE, failure.rank, failure.time),
        time=failure.time,
        severity="critical",
        cleared=bool(over_with),
        over_with=over_with,
        rank=failure.rank,
        where=failure.host or "",
        message=": ".join(filter(None, [lead, printable(failure.message)])),
        short=failure_summary(failure),
        last_line=printable((failure.traceback or "").strip().splitlines()[-1]) if failure.traceback else "",
    )


def _changed(change: ShareChange) -> FindingEntry:
    return FindingEntry(
        key=(SHARES, None, change.step),
        time=change.time,
        severity="info",
        rank=None,
        message=change_text(change),
        short=f"shares {shares_text(change.shares)}",
    )


def _lost(cause: Failure, consequences: Sequence[Failure]) -> FindingEntry:
    """Return one entry for all ranks that lost their connection when a peer failed."""
    count = len({failure.rank for failure in consequences})
    peer = f"rank {cause.rank}" if cause.rank is not None else "a peer"
    return FindingEntry(
        key=("lost_peer", cause.rank, consequences[0].time),
        time=max(failure.time for failure in consequences),
        severity="info",
        rank=consequences[0].rank if count == 1 else None,
        message=f"{count:,} rank{'s' * (count != 1)} lost the connection to {peer}",
        last_line=printable(consequences[0].message),
    )


def draw_findings(
    entries: Sequence[FindingEntry],
    width: int,
    height: int,
    *,
    cursor: int = 0,
    opened: bool = False,
    focused: bool = False,
    none: str = "nothing to report: no rank stands out",
) -> list[Row]:
    """Return the list as ``height`` rows of ``width`` cells, without entries the text ``none``.

    ``opened``: with details of the entry under the cursor.
    """
    if not entries:
        return [title_row(width, [("findings", "title")]), *centred_text(width, height - 1, [none])]
    over = sum(bool(entry.over_with) for entry in entries)
    cleared = sum(entry.cleared for entry in entries) - over
    changes = sum(entry.key[0] == SHARES for entry in entries)
    left: Row = [("findings", "title"), (" ", "base"), (f"{len(entries) - over - cleared - changes:,}", "bright")]
    left += [(f"  {cleared:,} cleared", "dim")] if cleared else []
    left += [(f"  {over:,} over", "dim")] if over else []
    left += [(f"  {changes} change{'s' * (changes > 1)} of shares", "dim")] if changes else []
    shown = _shown(entries, width, height - 1, cursor, opened=opened, focused=focused)
    is_cut = not focused and sum(len(_line(entry, width)) for entry in entries) > len(shown)
    details = _details(entries[cursor], width)
    is_open = bool(details) and any(row == details[0] for _, row in shown)
    hint = "f f shows all" if is_cut else "⏎ evidence and advice" if focused and not is_open else ""
    title = title_row(width, left, [[(hint, "dim")]] if hint else [])
    return fit_rows([title, *(row for _, row in shown)], width, height)


def _shown(
    entries: Sequence[FindingEntry], width: int, height: int, cursor: int, *, opened: bool, focused: bool
) -> list[tuple[int, Row]]:
    """Return the lines below the title, as many as fit, each with the index of its entry.

    The message under the cursor comes first, as long as the others keep a line each (with the focus they need not),
    then the other messages in order, then the details. An opened entry's details come before its message.
    """
    details = _details(entries[cursor], width)
    if opened and not details:
        details = [[(" " * DETAIL_INDENT_CELLS, "base"), ("no further evidence was recorded", "dim")]]
    standing = sum(not entry.cleared for index, entry in enumerate(entries) if index != cursor)
    overview = len(entries) - 1 if len(entries) <= height else standing
    kept = len(details) if opened else 0 if focused else overview
    needs = [len(_line(entry, width)) for entry in entries]
    lines = [1] * len(entries)
    lines[cursor] = max(min(needs[cursor], height - kept), 1)
    free = height - sum(lines) - (len(details) if opened else 0)
    for index, need in enumerate(needs):
        if index != cursor and need - 1 <= free:
            free -= need - 1
            lines[index] = need
    rows: list[tuple[int, Row]] = []
    for index, entry in enumerate(entries):
        at_cursor = index == cursor
        shown = _line(entry, width, pointed=at_cursor and focused, most=lines[index])
        if at_cursor:
            shown += details if opened or len(details) <= free else []
            first, last = len(rows), len(rows) + len(shown) - 1
        rows += [(index, row) for row in shown]
    top = min(max(0, last - height + 1), first)
    return rows[top : top + height]


def _line(entry: FindingEntry, width: int, *, pointed: bool = False, most: int | None = None) -> list[Row]:
    """Return an entry with its whole message; if that takes more than ``most`` lines, with its summary and a part."""
    sign, sign_role = SEVERITY_SIGNS.get(entry.severity, SEVERITY_SIGNS["warning"])
    role = "dim" if entry.cleared else "bright"
    if entry.cleared:
        sign, sign_role = "–" if entry.over_with else "✓", "dim"
    signs: Row = [("▸" if pointed else " ", "accent"), (f"{sign} ", sign_role)]
    when = (time.strftime("%H:%M:%S  ", time.localtime(entry.time)), "dim")
    who = f"{entry.ranks:,} ranks" if entry.ranks > 1 else _rank_or_run(entry)
    cleared: Row = [(f"  {end}", "dim")] if (end := _end(entry)) else []
    if width < NARROW_CELLS:
        head = [*signs, when, (who, role), *cleared]
        message = _indented(entry.message, role, width)
        if most is None or len(message) < most:
            return [head, *message]
        return _cut([[*signs, (entry.short, role), *cleared] if entry.short else head, *message], most)
    indent = 23  # cells of signs, time and rank before a message on the same line
    usable = width - indent - 2 - row_cells(cleared)
    texts = _wrapped(entry.message, usable)
    is_cut = most is not None and len(texts) > most
    if is_cut:
        texts.insert(0, entry.short if 0 < len(entry.short) <= usable else f"{texts.pop(0)} …")
    head = [*signs, when, (f"{who:<9} ", role), (texts[0], role)]
    rows = [head, *([(" " * indent, "base"), (line, role)] for line in texts[1:])]
    if most is not None and is_cut:
        rows = _cut(rows, most)
    rows[-1] += cleared
    if entry.where and row_cells(head) + len(entry.where) + 3 <= width:
        head.append((f"  {printable(entry.where)}", "dim"))
    return rows


def _end(entry: FindingEntry) -> str:
    """Return how an entry's finding ended; empty while it stands."""
    return f"over with {entry.over_with}" if entry.over_with else "cleared" if entry.cleared else ""


def _rank_or_run(entry: FindingEntry) -> str:
    return "run" if entry.rank is None else f"rank {entry.rank}"


def _cut(rows: list[Row], most: int) -> list[Row]:
    """Return the first ``most`` rows; the last of several ends with an ellipsis."""
    rows = rows[:most]
    if most > 1:
        *pieces, (text, role) = rows[-1]
        rows[-1] = [*pieces, (f"{text} …", role)]
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
            rows += _indented(text, role, width)
        elif text:
            for number, line in enumerate(_wrapped(text, max(width - DETAIL_INDENT_CELLS - 10, 20))):
                rows.append([(f"   {'' if number else label:<10}", "dim"), (line, role)])
    return rows


def finding_text(entry: FindingEntry) -> str:
    """Return an entry as text to paste: time, severity, rank, host, message, evidence, last line, advice, members."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    about = entry.message if entry.members else _about(entry)
    lines = [f"{at}  {', '.join(filter(None, [entry.severity, _end(entry)]))}: {about}"]
    for label, text in (("evidence", ", ".join(_figures(entry))), ("said", entry.last_line), ("advice", entry.advice)):
        lines += [f"{label}: {text}"] if text else []
    for member in entry.members:
        figures = ", ".join(_figures(member))
        lines.append(f"  {_about(member)}" + (f" ({figures})" if figures else ""))
    return "\n".join(lines)


def _about(entry: FindingEntry) -> str:
    """Return rank, host and message of an entry."""
    return f"{_rank_or_run(entry)}{f' on {printable(entry.where)}' if entry.where else ''}: {entry.message}"


def _figures(entry: FindingEntry) -> list[str]:
    """Return the names and numbers of the evidence: sizes in binary units, whole numbers without decimals."""
    figures = []
    for name, value in entry.evidence:
        figure = (
            size(int(value)) if "_bytes" in name else f"{value:,.0f}" if value.is_integer() else format_value(value)
        )
        figures.append(f"{name.replace('_bytes', '').replace('_', ' ')} {figure}")
    return figures


def _indented(text: str, role: str, width: int) -> list[Row]:
    lines = _wrapped(text, width - DETAIL_INDENT_CELLS)
    return [[(" " * DETAIL_INDENT_CELLS, "base"), (line, role)] for line in lines]


def _wrapped(text: str, width: int) -> list[str]:
    return [line.replace("\xa0", " ") for line in textwrap.wrap(text, max(width, 8))] or [""]


class Findings(Panel, can_focus=True):
    """List of the findings and failures."""

    BINDINGS: ClassVar[list[BindingType]] = [*MOVE_KEYS[:2], *MOVE_KEYS[4:], *bindings("findings")]
    PLACE = "findings"

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
        state = self.live.state
        past, changed = state.past_findings, state.shares.newest
        return (
            changed,
            len(past),
            past[-1].time if past else 0.0,
            len(state.findings),
            len(state.failures),
            self.live.over,
            self.live.caught_up,
        )

    def draw(self, width: int, height: int) -> list[Row]:
        entries, cursor = self._entries()
        none = "nothing was found" if self.live.over else "nothing to report: no rank stands out"
        none = none if self.live.caught_up else ""
        focused = self.has_focus
        return draw_findings(entries, width, height, cursor=cursor, opened=self._opened, focused=focused, none=none)

    def _entries(self) -> tuple[list[FindingEntry], int]:
        """Return the entries and the index of the one under the cursor; at first 0, the most urgent one."""
        entries = finding_entries(self.live.state)
        return entries, next((i for i, entry in enumerate(entries) if entry.key == self._key), 0)

    def action_move(self, lines: int) -> None:
        entries, cursor = self._entries()
        if entries:
            self._opened = False
            self._key = entries[min(max(cursor + lines, 0), len(entries) - 1)].key
            self.redraw()

    def action_edge(self, side: int) -> None:
        self.action_move(side << 20)  # further than any list is long

    def copyable(self) -> Copyable | None:
        entries, cursor = self._entries()
        return Copyable(finding_text(entries[cursor]), "the finding") if entries else None

    def action_open(self) -> None:
        """Open or close the finding under the cursor; opening selects its rank."""
        entries, cursor = self._entries()
        if not entries:
            return
        entry = entries[cursor]
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
        entries, cursor = self._entries()
        if not entries:
            return
        width, height = self.size
        shown = _shown(entries, width, height - 1, cursor, opened=self._opened, focused=self.has_focus)
        clicked = shown[y - 1][0] if 1 <= y <= len(shown) else cursor
        if clicked == cursor:
            self.action_open()
        else:
            self.action_move(clicked - cursor)
