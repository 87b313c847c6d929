"""Header of a run: status, condition, progress, loss, throughput, shares of computing and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gputrain_tui.console.widgets.drawing import EMPTY, Row, crop, fit_rows, row_cells
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.diagnosis.roll_up import marking_findings, roll_up
from gputrain_tui.headless.number_text import loss_text
from gputrain_tui.history.status_file import ENDED, Status
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import RunFigures, noise_text
from gputrain_tui.state.finding_text import by_urgency, failure_summary, finding_summary, run_mark
from gputrain_tui.state.standstill import Standstill
from gputrain_tui.state.start_activity import start_activity
from gputrain_tui.tables import duration, evaluation, of_weights, printable
from trainer.contract.record import Validation

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

SEVERITY_SIGNS = {"critical": ("✗", "error"), "warning": ("▲", "warning"), "info": ("·", "dim")}
LEAST_STEPS = 20


def run_condition(state: RunState, status: str = "running", standstill: Standstill | None = None) -> list[Row]:
    """Return the worst standing finding and the number of others, or a failed run's failure; the longest form first."""
    if status not in ("running", *ENDED):
        return []
    if status == "failed":
        return [] if state.root_cause is None else [[(failure_summary(state.root_cause), "error")]]
    standing = marking_findings(state) if status in ENDED else roll_up(state.findings.values(), state.ranks)
    findings = sorted(standing, key=by_urgency)
    if not findings:
        is_still = standstill is not None and standstill.is_long
        return [[("✓ no findings", "dim")]] if state.step >= LEAST_STEPS and not is_still else []
    worst = findings[0]
    sign, role = SEVERITY_SIGNS.get(worst.severity, SEVERITY_SIGNS["warning"])
    text = printable(finding_summary(worst))
    if status in ENDED and (marked := printable(run_mark(findings))):
        forms = dict.fromkeys((marked, marked.partition(" and ")[0], marked.partition(":")[0]))
        return [[(f"{sign} {form}", "warning")] for form in forms]
    more = f"  +{len(findings) - 1:,} more" if len(findings) > 1 else ""
    forms = dict.fromkeys((text + more, text, text.partition(":")[0]))
    return [[(f"{sign} {form}", role)] for form in forms]


STATUS_SIGNS: dict[str, tuple[str, str]] = {
    "queued": ("◷", "bright"),
    "starting": ("◌", "bright"),
    "running": ("●", "accent"),
    "stopping": ("◍", "warning"),
    "finished": ("✓", "bright"),
    "stopped": ("■", "bright"),
    "failed": ("✗", "error"),
    "lost": ("?", "warning"),
    "deleted": ("×", "warning"),
}


def sign_of(status: str, *, flagged: bool) -> tuple[str, str]:
    """Return sign and role of a status; ``flagged``: whether findings stand."""
    return ("▲", "warning") if flagged and status == "finished" else STATUS_SIGNS.get(status, ("?", "warning"))


@dataclass(frozen=True, kw_only=True)
class RunHeading:
    """Content of the header."""

    status: str
    name: str
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
    reading: float | None = None
    """Share of the record read so far, 0 to 1; None once all of it was read."""
    end: Status | None = None
    """Status of a run that has ended while its record is still being read, up to an earlier step."""
    condition: Sequence[Row] = ()
    """Condition of the run, the longest form first."""
    note: str = ""
    activity: str = ""
    """What the ranks do before the first step; empty where that is not known."""
    noise: str = ""
    """Gradient noise scale, and its meaning; empty where it is not known."""
    unmeasured: str = ""
    """Why no step of a script is measured; empty where that is not known."""


def draw_header(head: RunHeading, width: int, height: int) -> list[Row]:
    """Return the header as ``height`` rows of ``width`` cells."""
    return fit_rows([_names(head, width), _figures(head, width)], width, height)


def _names(head: RunHeading, width: int) -> Row:
    is_wrong = any(role != "dim" for form in head.condition for _, role in form)
    sign, role = sign_of(head.status, flagged=is_wrong)
    still = head.standstill
    is_long = still is not None and still.is_long
    if still is not None and is_long and not still.activity:
        role = "warning"
    left: Row = [(f" {sign} ", role), (head.status, role if role != "bright" else "title")]
    elapsed: Row = []
    if head.elapsed_s is not None:
        elapsed = [("elapsed ", "dim"), (duration(head.elapsed_s).rjust(7), "bright")]
    rest: Row = []
    if head.reading is not None:
        rest = [("   reading the record ", "dim"), (f"{head.reading:4.0%}", "accent")]
    elif head.eta_s is not None and head.status == "running" and not is_long:
        rest = [("   left ", "dim"), (duration(head.eta_s).rjust(7), "bright")]
    name: Row = [(crop(printable(head.name), max(width // 3, 12)), "title")]
    free = width - row_cells(left) - row_cells([*elapsed, *rest]) - row_cells(name) - 6
    if (rest or is_wrong) and head.condition and row_cells(head.condition[0]) + 3 > free:
        free += row_cells(elapsed)  # a finding is more important than the elapsed time
        elapsed = []
    ranks = f"{head.world_size:,} rank{'s' * (head.world_size != 1)}"
    if head.hosts > 1:
        ranks += f" on {head.hosts:,} hosts"
    further: list[Row] = [
        [(ranks, "bright")],
        next((form for form in head.condition if row_cells(form) + 3 <= free), []),
        [(head.id, "dim")],
        [(head.note, "warning" if head.status == "lost" else "dim")],
    ]
    shown = set()
    for index in (1, 3, 0, 2):  # from the most important piece
        if 3 < (needed := row_cells(further[index]) + 3) <= min(free, width):
            shown.add(index)
            free -= needed
    for pieces in [name, *(further[index] for index in sorted(shown))]:
        left += [("   ", "base"), *pieces]
    right: Row = [*elapsed, *rest, (" ", "base")]
    gap = width - row_cells(left) - row_cells(right)
    return [*left, (" " * max(gap, 1), "base"), *right]


def _figures(head: RunHeading, width: int) -> Row:
    """Return the progress bar and the figures; if they do not fit, the least important ones are dropped."""
    if head.status == "deleted":
        return [(" this run was deleted; below is what was read of it before", "warning")]
    if head.end is not None:
        at, loss = head.end.step, loss_text(head.end.loss)
        return [(" step ", "dim"), (f"{at:,}", "bright"), ("   loss ", "dim"), (loss, "title")] if at else []
    if not head.summary.step:
        return _without_step(head)
    fields = [*_training_fields(head, width), *_rate_fields(head)]
    if head.noise:
        fields.append((11, [("noise scale ", "dim"), (head.noise.partition(":")[0], "bright")]))
    progress = min(head.summary.step / head.total, 1.0) if head.total else None
    least_bar_cells, most_bar_cells = 8, 48
    bar_cells = 0 if progress is None else least_bar_cells + 8
    while len(fields) > 1 and _needed_cells(fields) + bar_cells > width - 1:
        least = max(order for order, _ in fields)
        fields = [field for field in fields if field[0] != least]
    row: Row = [(" ", "base")]
    if progress is not None:
        bar_cells = max(min(width - _needed_cells(fields) - 9, most_bar_cells), least_bar_cells)
        done = round(progress * bar_cells)
        row += [("━" * done, "accent"), ("─" * (bar_cells - done), "rule")]
        row += [(f" {progress:4.0%}", "bright"), ("   ", "base")]
    for index, (_, pieces) in enumerate(fields):
        row += [*([("   ", "base")] if index else []), *pieces]
    return row


def _without_step(head: RunHeading) -> Row:
    """Return the result of an evaluation, or why there is no step."""
    if (tested := head.tested) is not None:
        shown = evaluation(of_weights(tested.weights_step or 0), tested.loss, tested.metrics)
        return [(f" {tested.split} ", "dim"), (printable(shown), "title")]
    text = f"no step yet: {head.activity}" if head.activity else "no step yet"
    if head.status in (*ENDED, "lost"):
        text = "no step was measured"
    if head.status == "queued":
        text = "no step yet: it waits in the queue"
    return [(f" {printable(head.unmeasured or text)}", "dim")]


def _training_fields(head: RunHeading, width: int) -> list[tuple[int, Row]]:
    """Return step, epoch and losses, each with its place in the order of importance, from 0."""
    s, tested = head.summary, head.tested
    total = f"{head.total:,}" if head.total else ""
    step = f"{s.step:,}".rjust(max(len(total), 5))
    epochs = f"{s.epoch or EMPTY}" + (f"/{head.max_epochs}" if head.max_epochs else "")
    mean_from_cells = 140  # fewest cells of a header with the words ``mean of N ranks`` after the loss
    mean = f" mean of {head.world_size:,} ranks" if head.world_size > 1 and width >= mean_from_cells else ""
    fields: list[tuple[int, Row]] = [
        (0, [("step ", "dim"), (step, "bright"), (f"/{total}" if total else "", "dim")]),
        (7, [("epoch ", "dim"), (epochs, "bright")]),
        (2, [("loss ", "dim"), (loss_text(s.loss).rjust(6), "title"), (mean, "dim")]),
    ]
    if tested is not None:
        which = f" {of_weights(tested.weights_step or 0)}"
        fields.append((5, [(f"{tested.split} ", "dim"), (loss_text(tested.loss), "bright"), (which, "dim")]))
    if head.valid_loss is not None:
        fields.append((5, [("valid ", "dim"), (loss_text(head.valid_loss), "bright")]))
    return fields


def _rate_fields(head: RunHeading) -> list[tuple[int, Row]]:
    """Return the standstill, or the throughput and the shares of a step's time, with their places in the order."""
    s, still = head.summary, head.standstill
    fields: list[tuple[int, Row]] = []
    if still is not None:
        fields.append((1, [(still.text, "bright" if still.activity else "warning")]))
    if head.status == "lost" or (still is not None and still.is_long):
        return fields  # the rates are out of date
    rate, unit = s.rate
    fields.append((3, [(_rate(rate), "bright"), (f" {unit}", "dim")]))
    if s.tokens_per_s:
        fields.append((10, [(_rate(s.tokens_per_s), "bright"), (" tokens/s", "dim")]))
    if s.mfu is not None:
        fields.append((9, [("MFU ", "dim"), (f"{s.mfu:.1%}".rjust(5), "bright")]))
    fields.append((6, [("compute ", "dim"), (_percent(s.compute_share), "bright")]))
    if head.world_size > 1:
        fields.append((4, [("sync wait ", "dim"), (_percent(s.sync_share), "bright")]))
    if s.compute_share is not None:
        others = round(100 * s.compute_share) + round(100 * (s.sync_share or 0.0))  # as shown, so that all add up
        fields.append((8, [("rest ", "dim"), (_percent(max(100 - others, 0) / 100), "bright")]))
    return fields


def _needed_cells(fields: list[tuple[int, Row]]) -> int:
    return sum(row_cells(row) + 3 for _, row in fields) - 2


def _rate(value: float | None) -> str:
    return (EMPTY if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}").rjust(7)


def _percent(share: float | None) -> str:
    return (EMPTY if share is None else f"{share:.0%}").rjust(4)


class RunHeader(ClockPanel):
    """Header of two lines on the screens of a run."""

    DEFAULT_CSS = """
    RunHeader { dock: top; height: 2; background: $panel; }
    """

    def draw(self, width: int, height: int) -> list[Row]:
        return draw_header(heading(self.live), width, height)


def heading(live: LiveRun) -> RunHeading:
    """Return the content of a run's header."""
    state = live.state
    validation = state.validations.newest()
    return RunHeading(
        status=live.status,
        name=state.recipe or live.run.status.recipe,
        id=live.id,
        world_size=state.world_size,
        hosts=len({view.host for view in state.ranks.values()} - {None}),
        summary=state.figures,
        total=state.updates_total,
        max_epochs=state.max_epochs,
        valid_loss=validation.loss if validation is not None else None,
        tested=state.validations.newest_test(),
        elapsed_s=live.elapsed_s,
        eta_s=state.eta_s,
        standstill=live.standstill,
        reading=live.reading,
        end=live.run.status if live.status in ENDED and not live.caught_up else None,
        condition=run_condition(state, live.status, live.standstill) if live.caught_up else (),
        note=_note(live),
        activity=start_activity(state) or "ranks are joining" * bool(state.missing),
        noise=noise_text(state.noise_scale),
        unmeasured="" if state.unmeasured is None else state.unmeasured.message,
    )


def _note(live: LiveRun) -> str:
    """Return the note on a run that did not finish; empty for others."""
    if live.run.status.archived is not None:
        return "archived while it ran" if live.status == "lost" else "an archive"
    if live.status == "lost":
        return "its supervisor was killed; `gputrain stop` ends what is left"
    resumable = live.status in ("stopped", "failed") and live.can_resume
    return "4 History, r resumes from its checkpoint" if resumable else ""
