"""Renders the end of a run: the table of its ranks, its results, findings and failure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gputrain_tui.diagnosis.roll_up import marking_findings, newest_findings
from gputrain_tui.headless.number_text import further_rates, loss_text, number, percent
from gputrain_tui.headless.progress import Piece, event_line, paint
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.figures import noise_text, run_throughput
from gputrain_tui.state.finding_text import (
    NO_LOSS,
    NO_SAMPLES,
    NO_STEPS,
    failure_step,
    failure_words,
    is_cause,
    restarts_text,
    run_mark,
)
from gputrain_tui.state.job_queue import jobs_text
from gputrain_tui.state.newest_metrics import validated_metrics
from gputrain_tui.state.share_changes import change_text
from gputrain_tui.tables import TableColumn, duration, on_ranks, printable, table, width as cells
from trainer.contract.outcome import ENDED_EARLY, RESTARTED
from trainer.contract.record import Failure

MAX_TABLE_RANKS = 32
"""Maximum rows of the table, so that it does not scroll the results away."""
LOG_LINES = 12
"""Last lines of the failed rank's output that are shown: the end of most tracebacks."""
MAX_LINES = 12
"""Maximum lines of a list in a report, so that it does not scroll the results away."""
MAX_ATTEMPTS = 5
"""Maximum number of attempts before the last one, for the same reason."""
Lateness = Mapping[int, float]
"""Lateness in ms by rank, from ``RunState.lateness``."""
COLUMNS: tuple[tuple[TableColumn, int, Callable[[RankView, Lateness], str]], ...] = (
    (TableColumn("rank", right=True), 0, lambda view, _: str(view.rank)),
    (TableColumn("host"), 2, lambda view, _: view.host or ""),
    (TableColumn("device"), 3, lambda view, _: view.device or ""),
    (TableColumn("steps", right=True), 0, lambda view, _: number(view.totals.steps, 0)),
    (TableColumn("share", right=True), 0, lambda view, _: number(view.share, 0)),
    (TableColumn("loss", right=True), 0, lambda view, _: loss_text(view.loss)),
    (TableColumn("samples/s", right=True), 0, lambda view, _: number(view.totals.samples_per_s)),
    (TableColumn("steps/s", right=True), 0, lambda view, _: number(view.totals.steps_per_s)),
    (TableColumn("step ms", right=True), 4, lambda view, _: number(view.totals.mean_step_ms)),
    (TableColumn("late ms", right=True), 5, lambda view, late: number(late.get(view.rank))),
    (TableColumn("data", right=True), 0, lambda view, _: percent(view.totals.share("data"))),
    (TableColumn("compute", right=True), 0, lambda view, _: percent(view.totals.compute_share)),
    (TableColumn("sync", right=True), 0, lambda view, _: percent(view.totals.share("sync"))),
    (TableColumn("optimizer", right=True), 1, lambda view, _: percent(view.totals.share("optimizer"))),
    (TableColumn("other", right=True), 0, lambda view, _: percent(view.totals.share("other"))),
)
"""Columns of the closing table: title, order of omission on a narrow terminal (0: never), cell.

The loss is of the rank's last step, the share its samples of the last micro-steps where shares are balanced; all other
values are over the whole run. The shares of a step's time add up to 100 %.
Steps a second stand in for samples where no rank counts any.
"""


def closing_table(state: RunState, width: int) -> list[list[Piece]]:
    """Return a title and a row per rank; of more than ``MAX_TABLE_RANKS`` ranks, those most waited for."""
    views = list(state.ranks.values())
    hidden = len(views) - MAX_TABLE_RANKS
    late = state.lateness()
    without = "samples/s" if run_throughput(views).samples_per_s is None else "steps/s"
    hidden_titles = {without} if state.shares.newest is not None else {without, "share"}
    # Of ranks on several hosts the host matters more than the optimizer's part of a step.
    order = {"host": 1, "optimizer": 2} if len({view.host for view in views}) > 1 else {}
    columns = [
        (title, order.get(title.title, omitted), cell)
        for title, omitted, cell in COLUMNS
        if title.title not in hidden_titles
    ]
    if hidden > 0:
        views = sorted(views, key=lambda view: (-late.get(view.rank, 0.0), view.rank))[:MAX_TABLE_RANKS]
    for dropped in range(6 if late else 5, 0, -1):
        shown = [column for column in columns if column[1] < dropped]
        text = table([title for title, _, _ in shown], [[cell(view, late) for _, _, cell in shown] for view in views])
        title, *rows = text.splitlines()
        if max(map(cells, (title, *rows))) <= width:
            break
    lines: list[list[Piece]] = [[(title, "dim")], *([(row, "")] for row in rows)]
    if hidden > 0:
        lines.append([(f"… and {hidden} ranks that were less late", "dim")])
    return lines


def closing_lines(state: RunState, width: int, *, host: str = "") -> list[list[Piece]]:
    """Return the closing lines of a run: table and rates where it trained, evaluations, findings, checkpoint, sample.

    ``host``: prefix of the paths of checkpoints on another host, ``HOST:``; empty: they are here, or deleted.
    """
    lines = [*result_lines(state, width), *finding_lines(state)]
    kept = next((saved.path for saved in reversed(state.checkpoints) if host or Path(saved.path).exists()), None)
    if kept is not None:
        lines.append([("checkpoint ", "dim"), (f"{host}{kept}", "")])
    if state.sample is not None:
        lines.append([("sample", "dim")])
        lines += [[("  │ ", "dim"), (line, "")] for line in state.sample.text.splitlines()]
    return lines


def result_lines(state: RunState, width: int) -> list[list[Piece]]:
    """Return table and rates of a run that trained, its evaluations, and whether the parameters agree."""
    lines = closing_table(state, width) if state.step else []
    rates = run_throughput(state.ranks.values())
    rate, unit = rates.rate
    if rate is not None:
        # A run that waited or hung took longer than its steps, which alone the rates are over.
        over = f"in {_seconds(rates.stepping_s)} of {'recorded ' * bool(state.record_gap)}steps"
        text = "  ".join(filter(None, [f"{number(rate)} {unit}", further_rates(rates), over]))
        lines.append([(f"{'all ranks' if len(state.ranks) > 1 else 'rate':<11}", "dim"), (text, "")])
    if state.counts_anew:
        text = "those of all its starts, each of which counts from 1"
        lines.append([("steps      ", "dim"), (text, "")])
    ended = [each.message.removeprefix("finished: ") for each in state.past_findings if each.kind == ENDED_EARLY]
    lines += [[("ended      ", "dim"), (printable(text), "")] for text in ended[-1:]]
    if (change := state.shares.newest) is not None:
        lines.append([("shares     ", "dim"), (change_text(change).removeprefix("shares "), "")])
    lines += [[("not seen   ", "dim"), (text, "dim")] for text in _unseen(state)]
    for split in ("valid", "test"):
        validation = state.validations.newest(split)
        if validation is not None:
            text = paint((event_line(validation) or [])[1:], colour=False)
            lines.append([(f"{split:<11}", "dim"), (text, "")])
    best, newest = state.validations.best, state.validations.newest()
    if best is not None and newest is not None and best.step != newest.step:
        which = "" if best.metric == "loss" else "highest " if best.maximize else "lowest "
        text = f"step {best.step}  {which}{printable(best.metric)} {best.value:.4f}"
        lines.append([("best valid ", "dim"), (text, "")])
    validated = validated_metrics(state.validations)  # these stand above
    lines += metric_lines({k: v for k, v in state.metrics.values().items() if k not in validated}, width)
    if noise := noise_text(state.noise_scale):
        lines.append([("noise      ", "dim"), (f"the noise scale is {noise}", "")])
    if (agree := state.desync.equal) is not None and state.world_size > 1:
        alike = "divided among the ranks" if state.desync.divided else "equal on all ranks"
        text = alike if agree else "DIFFER between ranks"
        if bad := state.desync.non_finite:
            where = on_ranks(bad, state.world_size)
            text = f"NaN or infinite {where}" if agree else f"{text}; NaN or infinite {where}"
        lines.append([("parameters ", "dim"), (text, "" if agree and not bad else "alarm")])
    return lines


def metric_lines(metrics: Mapping[str, float], width: int) -> list[list[Piece]]:
    """Return the user's own metrics, as many as fit into two lines."""
    texts = [f"{printable(name)} {value:.4g}" for name, value in metrics.items()]
    lines = textwrap.wrap("  ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in texts), max(width - 11, 20))
    shown = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines[:2]]
    if lines[2:]:
        shown.append(f"… and {len(texts) - sum(map(len, (line.split('  ') for line in shown)))} more")
    rows: list[list[Piece]] = [
        [("metrics    " if not index else " " * 11, "dim"), (text, "")] for index, text in enumerate(shown)
    ]
    if rows:
        rows[-1].append(("  as last reported in training", "dim"))
    return rows


def _unseen(state: RunState) -> list[str]:
    """Return what was not seen of a script's steps, and why; nothing where no step was."""
    totals = [view.totals for view in state.ranks.values() if view.totals.steps]
    unseen = []
    if totals and not any(sums.counts_samples for sums in totals):
        reasons = [each.message for each in state.past_findings if each.cause == NO_SAMPLES] or [
            "samples: no batch was seen whose tensors have one leading dimension; if a step calls several models, only "
            "those of a DataLoader are"
        ]
        unseen.append(reasons[0])
    if totals and all(sums.whole_steps and sums.share("data") is None for sums in totals):
        unseen.append("the wait for data: it comes from no torch DataLoader (trainer.watch times any: watched.batches)")
    if totals and not any(sums.loss_steps for sums in totals):
        unseen += [each.message for each in state.past_findings if each.cause == NO_LOSS][:1]
    return unseen


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def finding_lines(state: RunState) -> list[list[Piece]]:
    """Return a line per finding except ``info``, those that are not cleared first."""
    lines: list[list[Piece]] = []
    for finding, stands in newest_findings(state):
        if finding.severity == "info":
            continue
        title, lead = ("finding" if stands else "cleared"), ""
        if stands and finding.step is not None:
            lead = f"step {finding.step}: "
        elif not stands and (over_with := state.ended_attempts.over_with(finding)):
            title, lead = "over", f"with {over_with}: "
        text = lead + (finding.message or finding.kind.replace("_", " "))
        lines.append([(f"{title:<11}", "dim"), (text, "alarm" if stands else "dim")])
    hidden = len(lines) - MAX_LINES
    return lines if hidden <= 0 else [*lines[:MAX_LINES], [(f"… and {hidden} findings more", "dim")]]


def attempt_lines(state: RunState) -> list[list[Piece]]:
    """Return a line for each attempt before the last one, with its cause; of many, the last ones."""
    ended = [finding for finding in state.past_findings if finding.kind == RESTARTED]
    hidden = len(ended) - MAX_ATTEMPTS
    more: list[list[Piece]] = [[(f"… and {hidden} attempts before", "dim")]] if hidden > 0 else []
    return more + [[(finding.message, "dim")] for finding in ended[-MAX_ATTEMPTS:]]


def status_line(state: RunState, *, status: str | None = None, elapsed_s: float | None = None) -> list[Piece]:
    """Return the last line of the report: status, duration, steps and samples, where they are counted.

    ``status`` and ``elapsed_s`` are those of the run's status file; by default those that its events tell.
    """
    elapsed_s = state.elapsed_s if elapsed_s is None else elapsed_s
    took = f" in {duration(elapsed_s)}" if elapsed_s is not None else ""
    restarts, jobs = sum(finding.kind == RESTARTED for finding in state.past_findings), state.queue.jobs
    took += restarts_text(restarts) + f",{jobs_text(jobs)}" * (jobs > 1)
    compile_s = max((view.totals.compile_ms for view in state.ranks.values()), default=0.0) / 1000
    took += f", {duration(compile_s)} of it compiling" if compile_s >= 1 else ""
    # The steps of a script are those of its last attempt or job; samples, rates and times are of all.
    begun_anew = state.counts_anew
    sums = [view.totals for view in (*state.ranks.values(), *state.former.values())]
    samples = sum(each.samples for each in sums if each.counts_samples)
    status = status or state.status
    style = "alarm" if status == "failed" else "bold"
    since = " since then" if restarts else " in the last one" if jobs > 1 else " since its last start"
    steps = f", {state.step} step{'s' * (state.step != 1)}{since * begun_anew}"
    resumed = f" since step {state.plan.first_update}" if state.plan is not None and state.plan.first_update else ""
    # Those that a failed attempt made after its last checkpoint are made again, and counted in both.
    of = " in all attempts" if restarts else " in all" if begun_anew else resumed * (jobs < 2)
    partly = any(each.counts_samples and each.counted_steps < each.steps for each in sums)
    steps += f", {'at least ' * partly}{samples:,} samples{of}" * bool(samples)
    if state.record_gap and state.counts_all_steps:
        steps = f"{steps}; {state.record_gap}"
    elif state.record_gap:
        steps = f"; {state.record_gap}; recorded: {steps.removeprefix(', ')}"
    elif not state.step and (state.unmeasured or status == "finished"):
        steps = f"; {state.unmeasured.message if state.unmeasured else 'no step was measured'}"
    if state.former:
        steps += f", {len(state.ranks)} of {len(state.ranks) + len(state.former)} ranks at the end"
    only_evaluated = not state.step and state.validations
    told = [NO_STEPS] * (not state.step) + ["record_incomplete"] * bool(state.record_gap)
    findings = [each for each in marking_findings(state) if each.kind not in told and each.cause not in told]
    if status == "failed":  # what else stood is no cause, and is listed above
        findings = [each for each in findings if is_cause(each, state.root_cause)]
    condition = run_mark(findings)
    return [
        (status, style),
        (took if only_evaluated else took + steps, ""),
        (f", with {condition}" if condition else "", "alarm"),
    ]


def failure_block(failure: Failure, log: Sequence[str], path: str) -> list[list[Piece]]:
    """Return lines with the failed rank, its error, and the last lines of its output, ``log`` of the file ``path``."""
    subject = f"rank {failure.rank}" if failure.rank is not None else "the run"
    where = f" on {failure.host}" if failure.host else ""
    lines: list[list[Piece]] = [
        [(f"{subject} failed{where}{failure_step(failure)}: {failure_words(failure)}", "alarm")],
        [("  " + failure.message, "bold")],
    ]
    if log:
        lines.append([(f"  its last output, of {path}:", "dim")])
        lines += [[("  │ " + line, "dim")] for line in log]
    return lines
