"""What was diagnosed in a run, newest first: enter opens a finding's evidence and advice and goes to its rank."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from gputrain_tui.console.ramp import Ramp
from gputrain_tui.console.widgets.drawing import Row, current, cut, headline
from gputrain_tui.console.widgets.drawing import message as remark
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.state import RunState
from gputrain_tui.tables import printable
from trainer.record import Failure, Finding

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

MARKS = {"critical": ("✗", "error"), "warning": ("▲", "warning"), "info": ("·", "dim")}
"""Mark and role per severity."""

MESSAGE = 23
"""Cells before the message."""
NO_MORE: Row = [("   ", "base"), ("no further evidence was recorded", "dim")]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the list."""

    key: tuple[str, int | None, float]
    """Kind, rank and when it was raised."""
    time: float
    """Unix seconds."""
    severity: str
    cleared: bool
    rank: int | None
    where: str
    """Host and device."""
    message: str
    evidence: Sequence[tuple[str, float]] = ()
    advice: str = ""
    said: str = ""
    """What the process itself told."""


def entries(state: RunState) -> list[Entry]:
    """Return what was found, newest first; a finding that was raised again is told once."""
    cause = state.root_cause
    others = [failure for failure in state.failures if failure != cause]
    consequences = [failure for failure in others if cause is not None and failure.kind == "lost_peer"]
    found: list[Entry] = [_failed(cause)] if cause is not None else []
    found += [_failed(failure) for failure in others if failure not in consequences]
    if cause is not None and consequences:
        found.append(_lost(cause, consequences))
    told: set[tuple[str, int | None]] = set()
    for finding in reversed(state.past_findings):
        about = (finding.kind, finding.rank)
        if finding.state == "raised" and about not in told:  # how it was raised tells more than that it was cleared
            told.add(about)
            found.append(_raised(finding, cleared=about not in state.findings))
    return sorted(found, key=lambda entry: (-entry.time, entry.rank if entry.rank is not None else -1))


def _raised(finding: Finding, *, cleared: bool) -> Entry:
    cause = f" ({finding.cause})" if finding.cause and finding.cause not in finding.message else ""
    return Entry(
        key=(finding.kind, finding.rank, finding.time),
        time=finding.time,
        severity=finding.severity,
        cleared=cleared,
        rank=finding.rank,
        where=" ".join(filter(None, (finding.host, (finding.device or "").partition(" ")[0]))),
        message=printable(finding.message or finding.kind.replace("_", " ")) + cause,
        evidence=tuple(finding.evidence.items()),
        advice=printable(finding.advice),
    )


def _failed(failure: Failure) -> Entry:
    at = (("at step", float(failure.step)),) if failure.step is not None else ()
    return Entry(
        key=(failure.kind, failure.rank, failure.time),
        time=failure.time,
        severity="critical",
        cleared=False,
        rank=failure.rank,
        where=failure.host or "",
        message=f"{failure.kind.replace('_', ' ')}: {printable(failure.message)}",
        evidence=at,
        said=printable((failure.traceback or "").strip().splitlines()[-1]) if failure.traceback else "",
    )


def _lost(cause: Failure, consequences: Sequence[Failure]) -> Entry:
    """Return one line for all ranks that noticed the failure of another."""
    count = len({failure.rank for failure in consequences})
    whom = f"rank {cause.rank}" if cause.rank is not None else "a peer"
    return Entry(
        key=("lost_peer", cause.rank, consequences[0].time),
        time=max(failure.time for failure in consequences),
        severity="info",
        cleared=False,
        rank=consequences[0].rank if count == 1 else None,
        where="",
        message=f"{count:,} rank{'s' * (count != 1)} lost the connection to {whom}",
        said=printable(consequences[0].message),
    )


def draw_findings(
    found: Sequence[Entry],
    width: int,
    height: int,
    *,
    cursor: int = 0,
    opened: bool = False,
    focused: bool = False,
    watching: bool = True,
) -> list[Row]:
    """Return the list as ``height`` rows of ``width`` cells.

    Args:
        found: newest first.
        width: cells.
        height: lines.
        cursor: index of the entry under the cursor.
        opened: whether its evidence and advice are shown.
        focused: whether the keys go here.
        watching: whether the run goes on, for what is said when there is nothing to say.
    """
    if height < 1 or width < 1:
        return [[] for _ in range(max(height, 0))]
    raised = [entry for entry in found if not entry.cleared]
    left: Row = [("findings", "title")]
    if found:
        left += [(" ", "base"), (f"{len(raised):,}", "bright")]
        if len(raised) < len(found):
            left.append((f"  {len(found) - len(raised):,} cleared", "dim"))
    rights: list[Row] = [[("⏎ evidence and advice", "dim")]] if found and focused else []
    rows = [cut(headline(width, left, rights), width)]
    if not found:
        what = "nothing to report: no rank stands out" if watching else "nothing was found"
        return rows + remark(width, height - 1, [what])
    # Where there is room it stands open: nobody has to ask for what fits.
    more = len(_details(found[cursor], width))
    fits = more > 0 and len(found) + more < height
    body: list[tuple[int, Row]] = []
    for index, entry in enumerate(found):
        here = index == cursor
        body.append((index, _line(entry, width, here=here and focused, whole=here and (opened or fits))))
        if here and (opened or fits):
            body += [(index, row) for row in _details(entry, width) or [NO_MORE]]
    first, last = (next(i for i, (of, _) in enumerate(body) if of == cursor),
                   max(i for i, (of, _) in enumerate(body) if of == cursor))  # fmt: skip
    visible = height - 1
    top = min(max(0, last - visible + 1), first) if last >= visible else 0
    rows += [cut(row, width) for _, row in body[top : top + visible]]
    return rows + [cut([], width) for _ in range(height - len(rows))]


def _message(entry: Entry, width: int) -> list[str]:
    """Return the message in lines that fit beside time and rank."""
    return textwrap.wrap(entry.message, max(width - MESSAGE - 2 - (9 if entry.cleared else 0), 8)) or [""]


def _line(entry: Entry, width: int, *, here: bool, whole: bool) -> Row:
    """Return an entry's line; ``whole``: what it cuts off the message stands below it."""
    first, *rest = _message(entry, width)
    mark, role = MARKS.get(entry.severity, MARKS["warning"])
    at = time.strftime("%H:%M:%S", time.localtime(entry.time))
    who = f"rank {entry.rank}" if entry.rank is not None else "run"
    text_role = "dim" if entry.cleared else "bright"
    row: Row = [
        ("▸" if here else " ", "accent"),
        (f"{'✓' if entry.cleared else mark} ", "dim" if entry.cleared else role),
        (f"{at}  ", "dim"),
        (who.ljust(9), text_role),
        (" ", "base"),
        (f"{first} …" if rest and not whole else first, text_role),
    ]
    if entry.cleared:
        row.append(("  cleared", "dim"))
    if entry.where and sum(len(text) for text, _ in row) + len(entry.where) + 3 <= width:
        row.append((f"  {printable(entry.where)}", "dim"))
    return row


def _details(entry: Entry, width: int) -> list[Row]:
    """Return what opens below a finding."""
    indent = " " * 3
    room = max(width - len(indent) - 10, 20)
    rows: list[Row] = [[(" " * MESSAGE, "base"), (line, "bright")] for line in _message(entry, width)[1:]]
    if entry.evidence:
        # A figure and its name stay together: blanks within them do not break.
        text = "   ".join(
            f"{name.replace('_', ' ')} {current(value)}".replace(" ", "\xa0") for name, value in entry.evidence
        )
        lines = [line.replace("\xa0", " ") for line in textwrap.wrap(text, room)]
        rows += [[(indent, "base"), (("evidence " if not i else "").ljust(10), "dim"), (line, "bright")]
                 for i, line in enumerate(lines)]  # fmt: skip
    for label, text, role in (("said", entry.said, "dim"), ("advice", entry.advice, "accent")):
        rows += [
            [(indent, "base"), ((f"{label} " if not i else "").ljust(10), "dim"), (line, role)]
            for i, line in enumerate(textwrap.wrap(text, room))
        ]
    return rows


class Findings(Panel, can_focus=True):
    """The list of findings."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("home", "move(-1000)", "First", show=False),
        Binding("end", "move(1000)", "Last", show=False),
        Binding("enter", "open", "Evidence and advice", show=False),
    ]

    class Picked(Message):
        """A finding was opened that speaks of a rank."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    live: LiveRun

    def __init__(self, live: LiveRun, *, id: str | None = None) -> None:
        super().__init__(live, id=id)
        self._key: tuple[str, int | None, float] | None = None
        """The entry under the cursor, which stays there when newer ones come."""
        self._opened = False

    def seen_version(self) -> object:
        """It changes with findings and failures only."""
        state = self.live.state
        past = state.past_findings
        return len(past), past[-1].time if past else 0.0, len(state.findings), len(state.failures), self.live.over

    def draw(self, width: int, height: int, ramp: Ramp) -> list[Row]:
        """Return the list."""
        found = entries(self.live.state)
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
        found = entries(self.live.state)
        if found:
            self._opened = False
            self._take(found, self._index(found) + lines)

    def action_open(self) -> None:
        """Open or close the finding under the cursor, and point at its rank."""
        found = entries(self.live.state)
        if not found:
            return
        entry = found[self._index(found)]
        self._key, self._opened = entry.key, not self._opened
        self.redraw()
        if self._opened and entry.rank is not None:
            self.post_message(self.Picked(entry.rank))

    def on_click(self, event: events.Click) -> None:
        """Take the finding under the pointer; a second click opens it."""
        _, y = event.get_content_offset_capture(self)
        found = entries(self.live.state)
        if self._opened or not 1 <= y <= len(found) or y - 1 == self._index(found):
            self.action_open()
        else:
            self._take(found, y - 1)

    def on_focus(self) -> None:
        """Show where the keys go."""
        self.redraw()

    def on_blur(self) -> None:
        """Show that the keys go elsewhere."""
        self.redraw()

    def _index(self, found: Sequence[Entry]) -> int:
        """Return the entry under the cursor; before it was moved that is the newest of what needs a person."""
        known = next((i for i, entry in enumerate(found) if entry.key == self._key), None)
        if known is not None:
            return known
        return next((i for i, entry in enumerate(found) if entry.severity == "critical" and not entry.cleared), 0)

    def _take(self, found: Sequence[Entry], index: int) -> None:
        self._key = found[min(max(index, 0), len(found) - 1)].key
        self.redraw()
