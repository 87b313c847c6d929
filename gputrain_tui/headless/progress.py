"""Renders the progress of a run as one updated line or as plain lines for a log, and single events as lines.

Only ``ProgressView`` writes, to standard error.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from gputrain_tui.diagnosis.roll_up import roll_up
from gputrain_tui.headless.number_text import further_rates, loss_text, number, percent
from gputrain_tui.hosts.host_names import is_pending
from gputrain_tui.lifecycle.attempt_outcome import ACCEPTED_STATES
from gputrain_tui.state import RunState
from gputrain_tui.state.job_queue import queued_text
from gputrain_tui.state.share_changes import change_text, gain_text, shares_text
from gputrain_tui.state.standstill import Standstill, StepWatch
from gputrain_tui.state.start_activity import start_activity
from gputrain_tui.tables import duration, evaluation, of_weights, printable, ranks_text, size
from trainer.contract.outcome import (
    AWAITS_HOSTS,
    EVALUATED_CHECKPOINT,
    LOST_PEER_KINDS,
    NO_UPDATE_LEFT,
    PORT_TAKEN,
    REQUEUED,
    RESTARTED,
    SEED_ON_RESUME,
    SETTINGS_ON_RESUME,
)
from trainer.contract.record import AnyEvent, Checkpoint, Finding, Lost, Queued, ShareChange, Step, Validation
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE

if TYPE_CHECKING:
    from gputrain_tui.headless.safe_stream import SafeStream
    from gputrain_tui.plan.planner import Plan

Piece = tuple[str, str]
"""Text and its style: ``""``, ``dim``, ``bold``, ``accent`` or ``alarm``."""
SHOWN_INFOS = (
    NO_UPDATE_LEFT, SEED_ON_RESUME, SETTINGS_ON_RESUME, EVALUATED_CHECKPOINT, REQUEUED, AWAITS_HOSTS, PORT_TAKEN,
    RESTARTED,
)  # fmt: skip
"""Kinds of findings of severity ``info`` that are printed."""
STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "accent": "\x1b[36m", "alarm": "\x1b[31m"}


def paint(pieces: Iterable[Piece], *, colour: bool) -> str:
    """Return the text of pieces with control characters made visible, and with escape sequences for ``colour``."""
    shown = ((printable(text), style) for text, style in pieces)
    return "".join(f"{STYLES[style]}{text}\x1b[0m" if colour and style and text else text for text, style in shown)


def length(pieces: Iterable[Piece]) -> int:
    """Return the number of characters of pieces."""
    return sum(len(text) for text, _ in pieces)


def clip(pieces: Sequence[Piece], width: int) -> list[Piece]:
    """Return the pieces cut to a number of characters, with an ellipsis if anything was cut."""
    if length(pieces) <= width:
        return list(pieces)
    cut: list[Piece] = []
    for text, style in pieces:
        if (left := width - 1 - length(cut)) <= 0:
            break
        cut.append((text[:left], style))
    return [*cut, ("…", "dim")]


REDRAW_S = 0.1
"""Time between two reads of the record and redraws of the progress line: faster changes cannot be read."""
PLAIN_S = 5.0
"""Time between two plain lines: 720 in the log of an hour."""
PLAIN_START_S = 15.0
"""Time without plain lines at the start, so that a refusal by the ranks is the only output."""
OMISSIONS = ("tokens", "late", "sync", "rate", "epoch", "eta")
"""Measures in the order in which a narrow terminal omits them."""
LINE_FORMS = ((False, 10, 0), (False, 10, 1), (True, 10, 1), *((True, 4, omitted) for omitted in range(1, 7)))
"""Forms of the progress line, widest first: whether words are short, columns of the bar, number of omitted measures."""


def progress_line(state: RunState, width: int, *, now: float, standstill: Standstill | None = None) -> list[Piece]:
    """Return one line of at most ``width`` columns; the least important measures are omitted first."""
    if failed := _failure_pieces(state):
        return clip(failed, width)
    if state.step == 0 or state.queue.is_before_ranks:
        return clip(_start_pieces(state, now), width)
    progress = state.progress
    for compact, least, omitted in LINE_FORMS:
        measures = _measures(state, standstill, compact=compact)
        parts = [pieces for name, pieces in measures if name not in OMISSIONS[:omitted]]
        taken = sum(length(pieces) + 2 for pieces in parts) - 2
        lead = least + 2 if progress is not None else 0
        if taken + lead <= width:
            break
    line: list[Piece] = []
    if progress is not None:
        columns = width - taken - 2
        line += bar(progress, min(columns, 40)) if columns >= 10 else [(f"{progress:>4.0%}", "bold")]
        line.append(("  ", ""))
    for index, pieces in enumerate(parts):
        line += ([("  ", "")] if index else []) + pieces
    return clip(line, width)


def bar(progress: float, width: int) -> list[Piece]:
    """Return a bar of ``width`` columns that ends with the percentage."""
    columns = width - 5
    done = int(progress * columns)
    return [("━" * done, "accent"), ("─" * (columns - done), "dim"), (f" {progress:>4.0%}", "bold")]


def _measures(
    state: RunState, standstill: Standstill | None, *, compact: bool = False
) -> list[tuple[str, list[Piece]]]:
    """Return name and text of each measure, in the order of the line."""
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
    rate, unit = figures.rate
    short = compact and figures.samples_per_s is not None
    measures.append(("rate", [(number(rate, 0 if short else 1), ""), ("/s" if short else f" {unit}", "dim")]))
    if further := further_rates(figures):
        measures.append(("tokens", [(further, "")]))
    if (latest := state.latest()) is not None:
        rank, late_ms = latest
        shown = f"{late_ms:.0f}" if compact else f"{late_ms:.1f}"
        if float(shown) > 0:
            measures.append(("late", [("late ", "dim"), (f"r{rank} {shown} ms", "")]))
    if figures.sync_share is not None and state.world_size > 1:
        share = f"{figures.sync_share:.0%}" if compact else percent(figures.sync_share)
        measures.append(("sync", [("sync ", "dim"), (share, "")]))
    if state.eta_s is not None:
        measures.append(("eta", [("eta ", "dim"), (duration(state.eta_s), "")]))
    return measures


def _start_pieces(state: RunState, now: float) -> list[Piece]:
    """Return the progress before the first step: queued, starting, joined ranks, or none missing."""
    waited = f"  {duration(now - state.started)}" if state.started is not None else ""
    joined, missing = state.joined, state.missing
    count = f"{state.world_size} rank{'s' * (state.world_size != 1)}"
    if state.queue.is_waiting:
        return [("queued" if state.queue.newest is None else f"queued as job {state.queue.newest.job}", "")]
    if state.queue.is_before_ranks and state.queue.jobs > 1:
        return [(f"starting {count}", "")]
    if state.joining is not None and missing:
        text = f"joined {len(joined)} of {state.world_size}, waiting for {ranks_text(missing)}"
    elif missing or not state.world_size:
        text = ": ".join(filter(None, [f"starting {count}", start_activity(state)]))
    elif state.validations or any(view.state == "validating" for view in state.ranks.values()):
        text = f"{count} evaluate"
    elif any(view.phase == "compile" for view in state.ranks.values()):
        text = f"{count}, compiling"
    elif state.unmeasured is not None:
        text = f"{count} started, {state.unmeasured.message.partition(',')[0]}"
    else:
        text = ": ".join(filter(None, [f"{count} started, no step yet", start_activity(state)]))
    return [(text, ""), (waited, "dim")]


def _failure_pieces(state: RunState) -> list[Piece]:
    """Return the cause of a failure, while the run ends or waits for its hosts; none before it is known."""
    failure = state.root_cause
    if failure is None or failure.kind in LOST_PEER_KINDS:
        return []
    where = "" if failure.rank is None else f"rank {failure.rank} "
    waits = next((each for each in state.findings.values() if each.kind == AWAITS_HOSTS), None)
    follows = "ending all processes" if waits is None or waits.time < failure.time else waits.message
    return [(f"{where}failed: {failure.message}", "alarm"), (f"  {follows}", "dim")]


def placement(plan: Plan) -> str:
    """Return ranks, hosts and devices of a plan: ``2 ranks on localhost (cpu, gloo)``."""
    hosts = list(dict.fromkeys(node.host for node in plan.nodes))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    if is_pending(hosts[0]):
        where = f"{len(hosts)} host{'s' * (len(hosts) != 1)} of Slurm's choice"
    kinds = " and ".join(sorted({"cpu" if device == "cpu" else "gpu" for n in plan.nodes for device in n.devices}))
    return f"{plan.world_size} rank{'s' * (plan.world_size != 1)} on {where} ({kinds}, {plan.backend})"


def plain_line(state: RunState, *, now: float, standstill: Standstill | None = None) -> str:
    """Return the state of a run as one line for a log."""
    if failed := _failure_pieces(state):
        return paint(failed, colour=False)
    if state.step == 0 or state.queue.is_before_ranks:
        return paint(_start_pieces(state, now), colour=False)
    done = f" ({state.progress:.0%})" if state.progress is not None else ""
    measures = [
        paint(pieces, colour=False) + (done if name == "step" else "") for name, pieces in _measures(state, standstill)
    ]
    return "  ".join(measures)


def event_line(event: AnyEvent, *, over_with: str = "") -> list[Piece] | None:
    """Return a line for an evaluation, checkpoint, finding, change of shares, queued job or lost events, else None.

    ``over_with``: the attempt with which a cleared finding was over, empty where it is cleared for another reason.
    """
    match event:
        case Validation():
            weights, step = event.weights_step, f"epoch {event.epoch}  step {event.step}"
            text = evaluation(step if weights is None else of_weights(weights), event.loss, event.metrics)
            return [(f"{event.split} ", "dim"), (text, "")]
        case ShareChange() if event.cause != "start":
            gain = "" if event.measured_ms is None else f"with shares {shares_text(event.shares)} {gain_text(event)}"
            return [(gain or change_text(event), "")]
        case Checkpoint():
            return [(f"saved step {event.step}  {event.path} ({size(event.bytes)})", "dim")]
        case Finding() if event.kind in SHOWN_INFOS and event.state == "raised":
            return [(event.message or "", "bold")]
        case Finding() if event.severity != "info":
            message = event.message or event.kind.replace("_", " ")
            if event.state == "cleared":
                cleared = f"cleared at step {event.step}: " if event.step else "cleared: "
                return [(f"over with {over_with}: " if over_with else cleared, "dim"), (message, "")]
            advice = f"; {event.advice}" if event.advice else ""
            return [(f"{event.severity}: {message}{advice}", "alarm")]
        case Queued():
            return [("queued ", "bold"), (queued_text(event), "")]
        case Lost():
            return [(f"warning: {event.events} events were not recorded: {event.message}", "alarm")]
    return None


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return a line as lines of at most ``width``, those after the first one indented, by default two cells more."""
    text = printable(text)  # a line break in a name is shown, and breaks no line
    indent = indent or " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False, expand_tabs=False,
    ) or [text]  # fmt: skip


def fitted(pieces: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Return a line as lines of at most ``width``, broken at words; later ones begin below what follows a title.

    A line that a program has printed is whole: it may be copied.
    """
    pieces = [(printable(piece), style) for piece, style in pieces]
    text = "".join(piece for piece, _ in pieces)
    if len(text) <= width or pieces[0][0].startswith("  │ "):
        return [pieces]
    title = pieces[0][0]
    indent = " " * (len(title) if len(pieces) > 1 and title.endswith(" ") else 2)
    lines: list[list[Piece]] = []
    end = 0
    for line in wrapped(text, width, indent):
        shown = line.removeprefix(indent) if lines else line
        begin = text.index(shown, end)
        end, at = begin + len(shown), 0
        lines.append([(indent, "")] if lines else [])
        for piece, style in pieces:
            if part := piece[max(begin - at, 0) : max(end - at, 0)]:
                lines[-1].append((part, style))
            at += len(piece)
    return lines


class ProgressView:
    """Progress of a run: a line updated in place on a terminal, plain lines at intervals elsewhere."""

    def __init__(
        self,
        state: RunState,
        stream: SafeStream | TextIO,
        *,
        live: bool,
        colour: bool,
        width: Callable[[], int],
        keeps_up: Callable[[], bool] = lambda: True,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without output.

        ``live``: whether to update a line in place; ``width``: columns of the terminal; ``keeps_up``: whether the
        stream's reader keeps up, without which the line is not redrawn; ``now``: Unix seconds; ``clock``: monotonic.
        """
        self._state = state
        self._stream = stream
        self._live = live
        self._colour = colour
        self._width = width
        self._keeps_up = keeps_up
        self._now = now
        self._clock = clock
        self._drawn_at = float("-inf")
        self._drawn = ""
        self._plain_at = clock()
        self._plain = ""
        """The last plain line, which is not repeated: as of a failure while its processes end."""
        self._steps = StepWatch()
        self._gaps: dict[int | None, str] = {}
        """By rank, the text of its gap of the record that was printed last."""
        self._first_line: Sequence[Piece] | None = None
        """First line while it is held back; None once written."""

    def introduce(self, pieces: Sequence[Piece]) -> None:
        """Set the first line, held back until something happens or until the ranks can no longer refuse the request.

        A refusal by a rank is then the only output, as a refusal by the preflight is, but for the progress of a long
        start: the run that the first line names is deleted.
        """
        self._first_line = pieces

    def open(self) -> None:
        """Write the first line, if it is held back."""
        if self._first_line is not None:
            lead, self._first_line = self._first_line, None
            self.print_line(lead)

    def update(self, events: Iterable[AnyEvent]) -> None:
        """Write lines for events that are already applied to the state, and redraw the progress if due."""
        if any(view.state in ACCEPTED_STATES for view in self._state.ranks.values()):
            self.open()
        for event in roll_up(events, self._state.ranks):
            # A log gets every checkpoint; on a terminal the closing report shows the last one.
            if type(event) is Step or (self._live and type(event) is Checkpoint):
                continue
            if type(event) is Finding and event.kind == RECORD_INCOMPLETE:
                if self._gaps.get(event.rank) == event.message:
                    continue  # only its counts have grown
                self._gaps[event.rank] = event.message
            over_with = self._state.ended_attempts.over_with(event) if isinstance(event, Finding) else ""
            if (line := event_line(event, over_with=over_with)) is not None:
                self.print_line(line, wrap=type(event) is Finding)
        now, tick = self._now(), self._clock()
        self._steps.note(self._state, tick)
        standstill = self._steps.standstill(self._state, tick)
        if self._live:
            if tick - self._drawn_at >= REDRAW_S:
                self._drawn_at = tick
                line = progress_line(self._state, self._width() - 1, now=now, standstill=standstill)
                self._draw(paint(line, colour=self._colour))
        elif tick - self._plain_at >= (PLAIN_S if self._first_line is None else PLAIN_START_S):
            self._plain_at = tick
            text = plain_line(self._state, now=now, standstill=standstill)
            if text != self._plain and not self._state.queue.is_waiting:  # the report about a queued job has its line
                self._plain = text
                self._write([(text, "")])

    def print_line(self, pieces: Sequence[Piece], *, wrap: bool = False) -> None:
        """Write a permanent line; ``wrap``: as several ones if the terminal is narrower, which breaks within words."""
        self.open()
        self._write(pieces, wrap=wrap)

    def _write(self, pieces: Sequence[Piece], *, wrap: bool = False) -> None:
        self.erase()
        lines = fitted(pieces, self._width()) if wrap and self._live else [pieces]
        self._stream.write("".join(f"{paint(line, colour=self._colour)}\n" for line in lines))
        self._stream.flush()

    def erase(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = ""

    def _draw(self, line: str) -> None:
        if line != self._drawn and self._keeps_up():
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
            self._drawn = line
