"""Renders the progress line, plain lines and closing table of a run; only ``ProgressView`` writes.

All but the closing table is narration and goes to stderr.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from gputrain_tui.diagnosis.roll_up import newest_findings, roll_up
from gputrain_tui.hosts.host_names import is_pending
from gputrain_tui.lifecycle.attempt_outcome import PAST_REFUSAL
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.figures import Throughput, run_throughput
from gputrain_tui.state.standstill import Standstill, StepWatch
from gputrain_tui.tables import TableColumn, duration, evaluation, of_weights, printable, size, table, width as cells
from trainer.contract.outcome import EVALUATED_CHECKPOINT, NO_UPDATE_LEFT, SEED_ON_RESUME
from trainer.contract.record import AnyEvent, Checkpoint, Failure, Finding, Lost, Queued, Step, Validation

if TYPE_CHECKING:
    from gputrain_tui.plan.planner import Plan

REDRAW_S = 0.1
"""Between two readings of the record and drawings of the progress line: faster changes cannot be read."""
PLAIN_S = 5.0
"""Between two plain lines: a log of an hour has 720."""
PLAIN_START_S = 15.0
"""Time without plain lines at the start: a refusal by the ranks then stands alone."""
MAX_TABLE_RANKS = 32
"""More would scroll the run's result away; those that the others waited for most are listed."""
LOG_LINES = 12
"""Last lines shown of the failed rank's output: the end of most tracebacks."""
MAX_FINDINGS = 10
"""More would scroll the run's result away."""
BAR_COLUMNS = (10, 40)
"""Minimum and maximum width of the bar."""
LINE_FORMS: tuple[tuple[bool, int, tuple[str, ...]], ...] = (
    (False, BAR_COLUMNS[0], ()),
    (False, BAR_COLUMNS[0], ("tokens",)),
    (True, BAR_COLUMNS[0], ("tokens",)),
    (True, 4, ("tokens",)),
    (True, 4, ("tokens", "slowest")),
    (True, 4, ("tokens", "slowest", "sync")),
    (True, 4, ("tokens", "slowest", "sync", "rate")),
    (True, 4, ("tokens", "slowest", "sync", "rate", "epoch")),
    (True, 4, ("tokens", "slowest", "sync", "rate", "epoch", "eta")),
)
"""Forms of the progress line, widest first: short words, columns of the bar, omitted measures."""

Piece = tuple[str, str]
"""Text and its style: ``""``, ``dim``, ``bold``, ``accent`` or ``alarm``."""

STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "accent": "\x1b[36m", "alarm": "\x1b[31m"}


def paint(pieces: Iterable[Piece], *, colour: bool) -> str:
    """Return the text of pieces, printable whatever it quotes, with their styles where colour is wanted."""
    shown = ((printable(text), style) for text, style in pieces)
    return "".join(f"{STYLES[style]}{text}\x1b[0m" if colour and style and text else text for text, style in shown)


def length(pieces: Iterable[Piece]) -> int:
    """Return the columns that pieces take."""
    return sum(len(text) for text, _ in pieces)


# ---------------------------------------------------------------------------------------------------- numbers


def number(value: float | None, digits: int = 1) -> str:
    """Return a count or rate for people: ``1,234``, ``12.3``; a dash when it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def loss_text(value: float | None) -> str:
    """Return a loss in nats with four decimals."""
    return "–" if value is None else f"{value:.4f}"


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return "–" if share is None else f"{100 * share:.1f}%"


# ------------------------------------------------------------------------------------------- the progress line


def progress_line(state: RunState, width: int, *, now: float, standstill: Standstill | None = None) -> list[Piece]:
    """Return one line of at most ``width`` columns; the least important measures are omitted first."""
    if state.step == 0:
        return clip(_starting(state, now), width)
    progress = state.progress
    for compact, least, dropped in LINE_FORMS:
        parts = [pieces for name, pieces in _measures(state, standstill, compact=compact) if name not in dropped]
        taken = sum(length(pieces) + 2 for pieces in parts) - 2
        lead = least + 2 if progress is not None else 0
        if taken + lead <= width:
            break
    line: list[Piece] = []
    if progress is not None:
        room = width - taken - 2
        line += bar(progress, min(room, BAR_COLUMNS[1])) if room >= BAR_COLUMNS[0] else [(f"{progress:>4.0%}", "bold")]
        line.append(("  ", ""))
    for index, pieces in enumerate(parts):
        line += ([("  ", "")] if index else []) + pieces
    return clip(line, width)


def bar(progress: float, width: int) -> list[Piece]:
    """Return a bar of ``width`` columns that ends with the percentage."""
    columns = width - 5
    done = int(progress * columns)
    return [("━" * done, "accent"), ("─" * (columns - done), "dim"), (f" {progress:>4.0%}", "bold")]


def clip(pieces: Sequence[Piece], width: int) -> list[Piece]:
    """Return the pieces cut to a width, with an ellipsis where something was lost."""
    if length(pieces) <= width:
        return list(pieces)
    cut: list[Piece] = []
    room = width - 1
    for text, style in pieces:
        if room <= 0:
            break
        cut.append((text[:room], style))
        room -= len(text)
    return [*cut, ("…", "dim")]


def _measures(
    state: RunState, standstill: Standstill | None, *, compact: bool = False
) -> list[tuple[str, list[Piece]]]:
    """Return name and text of each measure in the order of the line."""
    total, figures = state.updates_total, state.figures
    epochs = f"/{state.max_epochs}" if state.max_epochs else ""
    steps = f"{state.step}/{total}" if total else f"{state.step}"
    measures: list[tuple[str, list[Piece]]] = [
        ("epoch", [("ep " if compact else "epoch ", "dim"), (f"{figures.epoch}{epochs}", "")]),
        ("step", [("" if compact else "step ", "dim"), (steps, "")]),
        ("loss", [("loss ", "dim"), (loss_text(figures.loss), "bold")]),
    ]
    if standstill is not None:
        measures.append(("standstill", [(standstill.text, "" if standstill.activity else "alarm")]))
        if standstill.is_long:
            return measures
    rate = number(figures.samples_per_s, 0 if compact else 1)
    measures.append(("rate", [(rate, ""), ("/s" if compact else " samples/s", "dim")]))
    if further := _further_rates(figures):
        measures.append(("tokens", [(further, "")]))
    slowest = state.slowest()
    if slowest is not None:
        rank, late_ms = slowest
        late = f"r{rank} +{late_ms:.0f} ms" if compact else f"r{rank} +{late_ms:.1f} ms"
        measures.append(("slowest", [("slow " if compact else "slowest ", "dim"), (late, "")]))
    if figures.sync_share is not None and state.world_size > 1:
        share = f"{figures.sync_share:.0%}" if compact else percent(figures.sync_share)
        measures.append(("sync", [("sync ", "dim"), (share, "")]))
    if state.eta_s is not None:
        measures.append(("eta", [("eta ", "dim"), (duration(state.eta_s), "")]))
    return measures


def _further_rates(rates: Throughput) -> str:
    """Return tokens per second and model FLOPs utilization, as far as they are known."""
    tokens = "" if rates.tokens_per_s is None else f"{number(rates.tokens_per_s)} tokens/s"
    return "  ".join(filter(None, [tokens, "" if rates.mfu is None else f"MFU {percent(rates.mfu)}"]))


def _starting(state: RunState, now: float) -> list[Piece]:
    waited = f"  {duration(now - state.started)}" if state.started is not None else ""
    here, missing = state.joined, state.missing
    count = f"{state.world_size} rank{'s' * (state.world_size != 1)}"
    if state.queued is not None:
        return [(f"queued as job {state.queued.job}", "")]
    if state.joining is not None and missing:
        text = f"joined {len(here)} of {state.world_size}, waiting for {ranks_text(missing)}"
    elif missing or not state.world_size:
        text = f"starting {count}"
    elif any(view.state == "validating" for view in state.ranks.values()):
        text = f"{count} evaluate"
    else:
        text = f"{count} ready"
    return [(text, ""), (waited, "dim")]


def placed(plan: Plan) -> str:
    """Return how many ranks run where: ``2 ranks on localhost (cpu)``."""
    hosts = list(dict.fromkeys(node.host for node in plan.nodes))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    if is_pending(hosts[0]):
        where = f"{len(hosts)} host{'s' * (len(hosts) != 1)} of Slurm's choice"
    kinds = " and ".join(sorted({"cpu" if device == "cpu" else "gpu" for n in plan.nodes for device in n.devices}))
    return f"{plan.world_size} rank{'s' * (plan.world_size != 1)} on {where} ({kinds}, {plan.backend})"


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, … (12)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = ", ".join(str(rank) for rank in ranks[:limit])
    return f"ranks {names}" + (f", … ({len(ranks)})" if len(ranks) > limit else "")


# ------------------------------------------------------------------------------------------------- plain lines


def plain_line(state: RunState, *, now: float, standstill: Standstill | None = None) -> str:
    """Return the state of a run as one line for a log."""
    if state.step == 0:
        return paint(_starting(state, now), colour=False)
    done = f" ({state.progress:.0%})" if state.progress is not None else ""
    measures = [
        paint(pieces, colour=False) + (done if name == "step" else "") for name, pieces in _measures(state, standstill)
    ]
    return "  ".join(measures)


def event_line(event: AnyEvent) -> list[Piece] | None:
    """Return a line for an event that deserves one of its own, None for the others."""
    match event:
        case Validation():
            weights, step = event.weights_step, f"epoch {event.epoch}  step {event.step}"
            text = evaluation(step if weights is None else of_weights(weights), event.loss, event.metrics)
            return [(f"{event.split} ", "dim"), (text, "")]
        case Checkpoint():
            return [(f"saved step {event.step}  {event.path} ({size(event.bytes)})", "dim")]
        case Finding() if event.kind in (NO_UPDATE_LEFT, SEED_ON_RESUME, EVALUATED_CHECKPOINT):
            return [(event.message or "", "bold")]
        case Finding() if event.severity != "info":
            what = event.message or event.kind.replace("_", " ")
            if event.state == "cleared":
                return [(f"cleared at step {event.step}: " if event.step else "cleared: ", "dim"), (what, "")]
            advice = f"; {event.advice}" if event.advice else ""
            return [(f"{event.severity}: {what}{advice}", "alarm")]
        case Queued():
            parts = [f" in {event.partition}" if event.partition else "", f": {event.reason}" if event.reason else ""]
            if event.expected_start is not None:
                at = time.strftime("%Y-%m-%d %H:%M", time.localtime(event.expected_start))
                parts.append(f", expected to start at {at}")
            return [("queued ", "bold"), (f"as job {event.job}{''.join(parts)}", "")]
        case Lost():
            return [(f"warning: {event.events} events were not recorded: {event.message}", "alarm")]
    return None


# ------------------------------------------------------------------------------------------- the closing words


COLUMNS: tuple[tuple[TableColumn, int, Callable[[RankView], str]], ...] = (
    (TableColumn("rank", right=True), 0, lambda view: str(view.rank)),
    (TableColumn("host"), 2, lambda view: view.host or ""),
    (TableColumn("device"), 3, lambda view: view.device or ""),
    (TableColumn("steps", right=True), 0, lambda view: number(view.totals.steps, 0)),
    (TableColumn("loss", right=True), 0, lambda view: loss_text(view.loss)),
    (TableColumn("samples/s", right=True), 0, lambda view: number(view.totals.samples_per_s)),
    (TableColumn("step ms", right=True), 4, lambda view: number(view.totals.mean_step_ms)),
    (TableColumn("data", right=True), 0, lambda view: percent(view.totals.data_share)),
    (TableColumn("compute", right=True), 0, lambda view: percent(view.totals.compute_share)),
    (TableColumn("sync", right=True), 0, lambda view: percent(view.totals.sync_share)),
    (TableColumn("optimizer", right=True), 1, lambda view: percent(view.totals.optimizer_share)),
)
"""Columns of the closing table: title, order of omission on a narrow terminal (0: never), cell.

The loss is that of the rank's last step, all else is over the whole run.
"""


def closing_table(state: RunState, width: int) -> list[list[Piece]]:
    """Return a title and a row per rank; of very many ranks those that the others waited for most."""
    views = list(state.ranks.values())
    hidden = len(views) - MAX_TABLE_RANKS
    if hidden > 0:
        late = state.lateness()
        views = sorted(views, key=lambda view: (-late.get(view.rank, 0.0), view.rank))[:MAX_TABLE_RANKS]
    for dropped in range(5, 0, -1):
        shown = [column for column in COLUMNS if column[1] < dropped]
        text = table([title for title, _, _ in shown], [[cell(view) for _, _, cell in shown] for view in views])
        title, *rows = text.splitlines()
        if max(map(cells, (title, *rows))) <= width:
            break
    lines: list[list[Piece]] = [[(title, "dim")], *([(row, "")] for row in rows)]
    if hidden > 0:
        lines.append([(f"… and {hidden} ranks that were waited for less", "dim")])
    return lines


def closing_lines(
    state: RunState, width: int, *, is_there: Callable[[str], bool] = lambda _: True, place: str = ""
) -> list[list[Piece]]:
    """Return the closing lines of a run: table and rates where it trained, evaluations, findings, checkpoint, sample.

    Args:
        state: of the run.
        width: columns of the terminal.
        is_there: whether a checkpoint still exists.
        place: stands before its path: the host that has it, where that is not this machine.
    """
    lines = closing_table(state, width) if state.step else []
    rates = run_throughput(state.ranks.values())
    if further := _further_rates(rates):
        text = f"{number(rates.samples_per_s)} samples/s  {further}"
        lines.append([(f"{'all ranks':<11}", "dim"), (text, "")])
    for split in ("valid", "test"):
        validation = state.last_validation(split)
        if validation is not None:
            text = paint((event_line(validation) or [])[1:], colour=False)
            lines.append([(f"{split:<11}", "dim"), (text, "")])
    if (agree := state.desync.equal) is not None and state.world_size > 1:
        text, style = ("equal on all ranks", "") if agree else ("DIFFER between ranks", "alarm")
        lines.append([("parameters ", "dim"), (text, style)])
    lines += finding_lines(state)
    kept = next((saved.path for saved in reversed(state.checkpoints) if is_there(saved.path)), None)
    if kept is not None:
        lines.append([("checkpoint ", "dim"), (f"{place}{kept}", "")])
    if state.sample is not None:
        lines.append([("sample", "dim")])
        lines += [[("  │ ", "dim"), (line, "")] for line in state.sample.text.splitlines()]
    return lines


def finding_lines(state: RunState) -> list[list[Piece]]:
    """Return a line per finding, those that are not cleared first."""
    lines: list[list[Piece]] = []
    for finding, stands in newest_findings(state):
        if finding.severity == "info":
            continue
        since = f" since step {finding.step}" if finding.step is not None else ""
        what = finding.message or finding.kind.replace("_", " ")
        title = (f"{'finding' if stands else 'was found':<11}", "dim")
        lines.append([title, (what + (since if stands else ", no longer"), "alarm" if stands else "dim")])
    hidden = len(lines) - MAX_FINDINGS
    return lines if hidden <= 0 else [*lines[:MAX_FINDINGS], [(f"… and {hidden} findings more", "dim")]]


def ending(state: RunState) -> list[Piece]:
    """Return the last line: status, duration, steps and samples."""
    took = f" in {duration(state.time - state.started)}" if state.started is not None else ""
    samples = sum(view.totals.samples for view in state.ranks.values())
    status = state.status
    style = "alarm" if status == "failed" else "bold"
    steps = f", {state.step} step{'s' * (state.step != 1)}, {samples:,} samples"
    only_evaluated = not state.step and state.validations
    return [(status, style), (took if only_evaluated else took + steps, "")]


def failure_block(failure: Failure, log: Sequence[str], path: str) -> list[list[Piece]]:
    """Return the rank that failed, the reason, and the end of its output."""
    who = f"rank {failure.rank}" if failure.rank is not None else "the run"
    where = f" on {failure.host}" if failure.host else ""
    when = f" at step {failure.step}" if failure.step is not None else ""
    kind = failure.kind.replace("_", " ")
    lines: list[list[Piece]] = [
        [(f"{who} failed{where}{when}: {kind}", "alarm")],
        [("  " + failure.message, "bold")],
    ]
    if log:
        lines.append([(f"  its last output, of {path}:", "dim")])
        lines += [[("  │ " + line, "dim")] for line in log]
    return lines


# ---------------------------------------------------------------------------------------------------- the view


class Stream(Protocol):
    """A text stream for narration."""

    def write(self, text: str, /) -> object:
        """Write text."""

    def flush(self) -> None:
        """Flush what was written."""


class ProgressView:
    """Shows the progress of a run: a line updated in place on a terminal, plain lines at intervals elsewhere."""

    def __init__(
        self,
        state: RunState,
        stream: Stream,
        *,
        live: bool,
        colour: bool,
        width: Callable[[], int],
        keeps_up: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Start without output.

        Args:
            state: the run.
            stream: output.
            live: whether to update a line in place.
            colour: whether to colour.
            width: returns the columns.
            keeps_up: whether the stream's reader keeps up; otherwise the progress line is not redrawn.
            now: Unix seconds.
        """
        self._state = state
        self._stream = stream
        self._live = live
        self._colour = colour
        self._width = width
        self._keeps_up = keeps_up
        self._now = now
        self._drawn_at = float("-inf")
        self._drawn = ""
        self._plain_at = now()
        self._steps = StepWatch()
        self._first_line: Sequence[Piece] | None = None
        """The first line while it is held back."""

    def introduce(self, pieces: Sequence[Piece]) -> None:
        """Hold back the first line until there is a second one, or the ranks can no longer refuse the request.

        A refusal by a rank is then the only output, like any other refusal.
        """
        self._first_line = pieces

    def open(self) -> None:
        """Write the first line, if it is held back."""
        if self._first_line is not None:
            lead, self._first_line = self._first_line, None
            self.say(lead)

    def update(self, events: Iterable[AnyEvent]) -> None:
        """Show the changes by events that are already applied to the state."""
        if any(view.state in PAST_REFUSAL for view in self._state.ranks.values()):
            self.open()
        for event in roll_up(events, self._state.ranks):
            # A terminal shows the last checkpoint at the end, a log each one as it comes.
            if type(event) is Step or (self._live and type(event) is Checkpoint):
                continue
            if (line := event_line(event)) is not None:
                self.say(line)
        now = self._now()
        self._steps.note(self._state, now)
        standstill = self._steps.standstill(self._state, now)
        if self._live:
            if now - self._drawn_at >= REDRAW_S:
                self._drawn_at = now
                line = progress_line(self._state, self._width() - 1, now=now, standstill=standstill)
                self._draw(paint(line, colour=self._colour))
        elif now - self._plain_at >= (PLAIN_S if self._first_line is None else PLAIN_START_S):
            self._plain_at = now
            self.say([(plain_line(self._state, now=now, standstill=standstill), "")])

    def say(self, pieces: Sequence[Piece]) -> None:
        """Write a permanent line."""
        self.open()
        self.erase()
        self._stream.write(paint(pieces, colour=self._colour) + "\n")
        self._stream.flush()

    def erase(self) -> None:
        """Erase the progress line."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = ""

    def _draw(self, line: str) -> None:
        if line != self._drawn and self._keeps_up():
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
            self._drawn = line
