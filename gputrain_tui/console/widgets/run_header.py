"""Header of a run: status, condition, progress, loss, throughput, shares of computing and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gputrain_tui.console.widgets.drawing import EMPTY, Row, fit_row, row_cells
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.console.widgets.run_condition import run_condition
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.state.figures import RunFigures
from gputrain_tui.state.standstill import Standstill
from gputrain_tui.tables import duration, evaluation, of_weights, printable
from trainer.contract.record import Validation

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

MARKS: dict[str, tuple[str, str]] = {
    "queued": ("◷", "bright"),
    "starting": ("◌", "bright"),
    "running": ("●", "accent"),
    "stopping": ("◍", "warning"),
    "finished": ("✓", "bright"),
    "stopped": ("■", "bright"),
    "failed": ("✗", "error"),
    "lost": ("?", "warning"),
}
"""Mark and role of each status."""
MARKED = ("▲", "warning")
"""Mark and role of a finished run with findings that stand."""
BAR_CELLS = (8, 48)
"""Least and greatest width of the progress bar."""


def mark_of(status: str, *, marked: bool) -> tuple[str, str]:
    """Return mark and role of a status; ``marked``: whether findings stand."""
    return MARKED if marked and status == "finished" else MARKS.get(status, ("?", "warning"))


@dataclass(frozen=True, kw_only=True)
class RunHeading:
    """Content of the header."""

    status: str
    name: str
    """Name of the recipe."""
    id: str
    world_size: int
    hosts: int
    summary: RunFigures
    total: int | None = None
    """Steps after which the training ends."""
    max_epochs: int = 0
    valid_loss: float | None = None
    """Loss of the newest validation, nats."""
    tested: Validation | None = None
    """Newest result on the test split, or of an evaluation-only run."""
    elapsed_s: float | None = None
    eta_s: float | None = None
    standstill: Standstill | None = None
    """Standstill of the run; None while steps come."""
    reading: float | None = None
    """Share of the record read so far, 0 to 1; None once all of it was read."""
    condition: Sequence[Row] = ()
    """Condition of the run, the longest form first."""
    note: str = ""
    """Note on a run that did not finish, such as how it can be resumed."""


def draw_header(head: RunHeading, width: int, height: int) -> list[Row]:
    """Return the header as ``height`` rows of ``width`` cells."""
    return [fit_row(_names(head, width), width), fit_row(_figures(head, width), width)][:height]


def _names(head: RunHeading, width: int) -> Row:
    is_wrong = any(role != "dim" for form in head.condition for _, role in form)
    mark, role = mark_of(head.status, marked=is_wrong)
    still = head.standstill
    if still is not None and still.is_long and not still.activity:
        role = "warning"
    left: Row = [(f" {mark} ", role), (head.status, role if role != "bright" else "title")]
    elapsed: Row = []
    if head.elapsed_s is not None:
        elapsed = [("elapsed ", "dim"), (duration(head.elapsed_s).rjust(7), "bright")]
    rest: Row = []
    if head.reading is not None:
        rest = [("   reading the record ", "dim"), (f"{head.reading:4.0%}", "accent")]
    elif head.eta_s is not None and head.status == "running" and not (still is not None and still.is_long):
        rest = [("   left ", "dim"), (duration(head.eta_s).rjust(7), "bright")]
    right: Row = [*elapsed, *rest, (" ", "base")]
    name: Row = [(printable(head.name), "title")]
    room = width - row_cells(left) - row_cells(right) - row_cells(name) - 5
    if (
        (rest or is_wrong) and head.condition and row_cells(head.condition[0]) + 3 > room
    ):  # a finding is more important than the elapsed time
        room += row_cells(right) - row_cells(rest) - 1
        right = [*rest, (" ", "base")]
    how = next((form for form in head.condition if row_cells(form) + 3 <= room), [])
    ranks = f"{head.world_size:,} rank{'s' * (head.world_size != 1)}"
    if head.hosts > 1:
        ranks += f" on {head.hosts:,} hosts"
    more: list[Row] = [
        [(ranks, "bright")],
        list(how),
        [(head.id, "dim")],
        [(head.note, "warning" if head.status == "lost" else "dim")],
    ]
    shown = set()
    for index in (1, 3, 0, 2):  # the most important pieces get the room first
        if (taken := row_cells(more[index]) + 3) <= min(room, width) and taken > 3:
            shown.add(index)
            room -= taken
    for pieces in [name, *(more[index] for index in sorted(shown))]:
        left += [("   ", "base"), *pieces]
    gap = width - row_cells(left) - row_cells(right)
    return [*left, (" " * max(gap, 1), "base"), *right]


def _figures(head: RunHeading, width: int) -> Row:
    """Return the progress bar and the figures; if they do not fit, the least important ones are dropped."""
    s = head.summary
    if not s.step and head.tested is not None:
        shown = evaluation(of_weights(head.tested.weights_step or 0), head.tested.loss, head.tested.metrics)
        return [(f" {head.tested.split} ", "dim"), (printable(shown), "title")]
    if not s.step:
        over = head.status in (*ENDED, "lost")
        return [(" no step was made" if over else " no step yet: ranks are joining", "dim")]
    total = f"{head.total:,}" if head.total else ""
    step = f"{s.step:,}".rjust(max(len(total), 5))
    epochs = f"{s.epoch or EMPTY}" + (f"/{head.max_epochs}" if head.max_epochs else "")
    fields: list[tuple[int, Row]] = [
        (0, [("step ", "dim"), (step, "bright"), (f"/{total}" if total else "", "dim")]),
        (7, [("epoch ", "dim"), (epochs, "bright")]),
        (2, [("loss ", "dim"), (loss_text(s.loss).rjust(6), "title"), (_mean_of(head, width), "dim")]),
    ]
    still = head.standstill
    if still is not None:
        fields.append((1, [(still.text, "bright" if still.activity else "warning")]))
    if head.status != "lost" and not (still is not None and still.is_long):  # else the rates are out of date
        fields += [
            (3, [(_rate(s.samples_per_s).rjust(7), "bright"), (" samples/s", "dim")]),
            *([(9, [(_rate(s.tokens_per_s).rjust(7), "bright"), (" tokens/s", "dim")])] if s.tokens_per_s else []),
            *([(8, [("MFU ", "dim"), (f"{s.mfu:.1%}".rjust(5), "bright")])] if s.mfu is not None else []),
            (6, [("compute ", "dim"), (_percent(s.compute_share), "bright")]),
            (4, [("sync wait ", "dim"), (_percent(s.sync_share), "bright")]),
        ]
    if head.valid_loss is not None:
        fields.insert(3, (5, [("valid ", "dim"), (loss_text(head.valid_loss), "bright")]))
    if head.tested is not None:
        which = of_weights(head.tested.weights_step or 0)
        loss = loss_text(head.tested.loss)
        fields.insert(3, (5, [(f"{head.tested.split} ", "dim"), (loss, "bright"), (f" {which}", "dim")]))
    if head.world_size == 1:
        fields = [field for field in fields if field[0] != 4]
    progress = min(s.step / head.total, 1.0) if head.total else None
    chosen = list(fields)
    while len(chosen) > 1 and _needed_cells(chosen, progress) > width - 1:
        least = max(order for order, _ in chosen)
        chosen = [field for field in chosen if field[0] != least]
    row: Row = [(" ", "base")]
    if progress is not None:
        room = width - _needed_cells(chosen, None) - 9
        bar_cells = max(min(room, BAR_CELLS[1]), BAR_CELLS[0])
        done = round(progress * bar_cells)
        row += [
            ("━" * done, "accent"),
            ("─" * (bar_cells - done), "rule"),
            (f" {progress:4.0%}", "bright"),
            ("   ", "base"),
        ]
    for index, (_, pieces) in enumerate(chosen):
        row += [*([("   ", "base")] if index else []), *pieces]
    return row


def _mean_of(head: RunHeading, width: int) -> str:
    """Return the words ``mean of N ranks`` for the loss; empty for one rank or in a narrow header."""
    mean_from_cells = 140  # fewest cells of a header with the words ``mean of N ranks`` after the loss
    return f" mean of {head.world_size:,} ranks" if head.world_size > 1 and width >= mean_from_cells else ""


def _needed_cells(fields: list[tuple[int, Row]], progress: float | None) -> int:
    return 1 + sum(row_cells(row) + 3 for _, row in fields) - 3 + (BAR_CELLS[0] + 8 if progress is not None else 0)


def _rate(value: float | None) -> str:
    return EMPTY if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return (EMPTY if share is None else f"{share:.0%}").rjust(4)


class RunHeader(ClockPanel):
    """Header of two lines on the screens of a run."""

    DEFAULT_CSS = """
    RunHeader { dock: top; height: 2; background: $panel; }
    """

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the header."""
        return draw_header(heading(self.live), width, height)


def heading(live: LiveRun) -> RunHeading:
    """Return the content of a run's header."""
    state = live.state
    status = live.status
    still = live.standstill
    hosts = {view.host for view in state.ranks.values()} - {None}
    return RunHeading(
        status=status,
        name=state.recipe or live.run.status.recipe,
        id=live.id,
        world_size=state.world_size,
        hosts=len(hosts),
        summary=state.figures,
        total=state.updates_total,
        max_epochs=state.max_epochs,
        valid_loss=evaluated.loss if (evaluated := state.last_validation()) is not None else None,
        tested=state.last_test(),
        elapsed_s=live.elapsed_s,
        eta_s=state.eta_s,
        standstill=still,
        reading=live.reading,
        condition=run_condition(state, status, still),
        note=_note(live),
    )


def _note(live: LiveRun) -> str:
    """Return the note on a run that did not finish; empty for others."""
    if live.run.status.archived is not None:
        return "archived while it ran" if live.status == "lost" else "an archive"
    if live.status == "lost":
        return "its supervisor was killed"
    resumable = live.status in ("stopped", "failed") and live.can_resume
    return "4 History, r resumes from its checkpoint" if resumable else ""
