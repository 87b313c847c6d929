"""Renders the report of a run as text: what limits it first, then its steps, ranks, results and findings."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.headless.closing_report import MAX_LINES, failure_block, result_lines, status_line
from gputrain_tui.headless.number_text import number, percent
from gputrain_tui.headless.progress import Piece, fitted, wrapped
from gputrain_tui.report.report_fields import FindingReport, HostHardware, RunReport, SavedCheckpoint
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import DDP, GroupFigures, members_text, operations_text
from gputrain_tui.state.finding_text import urgency
from gputrain_tui.tables import TableColumn, cut, cut_apart, duration, printable, size, table

BAR_CELLS = 30
NAMES = {"data": "data and copies", "sync": "exposed synchronisation", "other": "outside of all phases"}
"""Names of the parts of a step, where the identifier does not read well."""


def report_lines(report: RunReport, state: RunState, width: int) -> list[list[Piece]]:
    """Return the report in lines of about ``width`` cells; messages are never cut, but wrapped."""
    lines: list[list[Piece]] = [
        [(report.id, "bold"), ("  ", ""), *status_line(state, status=report.state, elapsed_s=report.duration_s)]
    ]
    if report.state in ("starting", "lost", "stopped") and report.message:
        lines += _wrapped(report.message, "alarm" if report.state == "lost" else "", width)
    lines += _wrapped(report.verdict.text, "alarm" if report.verdict.is_problem else "bold", width)
    if report.verdict.advice:
        lines += _wrapped(f"→ {report.verdict.advice}", "accent", width)
    if report.record_gap:
        lines.append([("record     ", "dim"), (report.record_gap, "alarm")])
    for text in _limited([*report.attempts][::-1], "attempts before"):
        lines.append([("attempt    ", "dim"), (text, "")])
    if state.root_cause is not None and report.state == "failed":
        lines += [[], *failure_block(state.root_cause, (), "")]
    if report.parts:
        over = f"  means over {report.means_over}, `gputrain compare` leaves the first tenth out"
        lines += [[], *fitted([("where a step's time goes", "bold"), (over, "dim")], width), *_part_lines(report)]
    if any(each.group != DDP for each in report.groups):
        steps = max(view.groups.recent_steps for view in state.ranks.values())
        over = f"  per step and rank, means over the last {steps:,} steps"
        shown = [line for each in _group_lines(report.groups) for line in fitted(each, width)]
        lines += [[], [("collectives", "bold"), (over, "dim")], *shown]
    if state.step or state.validations:
        results = [line for each in result_lines(state, width) for line in fitted(each, width)]
        lines += [[], [("ranks and results", "bold")], *results]
    if report.checkpoints:
        lines += [[], [("checkpoints", "bold")], *_checkpoint_lines(report.checkpoints)]
    if found := _finding_lines(report, width):
        lines += [[], [("what was found, and when", "bold")], *found]
    if report.hosts:
        lines += [[], [("hardware and versions", "bold")], *([(text, "")] for text in _hosts(report.hosts))]
    if report.previous_run is not None:
        lines += [[], [("recipe", "bold"), (f"  compared with {report.previous_run}", "dim")], *_changes(report)]
    lines += [[], [("record ", "dim"), (report.run_dir, "")]]
    return lines


def _part_lines(report: RunReport) -> list[list[Piece]]:
    rows = [
        (NAMES.get(part.name, part.name), number(part.ms), percent(part.share), "█" * round(part.share * BAR_CELLS))
        for part in report.parts
    ]
    columns = [TableColumn("part"), TableColumn("ms", right=True), TableColumn("share", right=True), TableColumn("")]
    return table_lines(columns, rows)


def table_lines(
    columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], more: Sequence[str] = ()
) -> list[list[Piece]]:
    """Return an indented table and lines below it."""
    title, *texts = table(columns, rows).splitlines()
    return [[("  " + title, "dim")], *([("  " + text, "")] for text in (*texts, *more))]


def _group_lines(groups: Sequence[GroupFigures]) -> list[list[Piece]]:
    rows = [
        (
            printable(each.group),
            members_text(each.ranks) or "–",
            f"{each.calls:.4g}",
            size(int(each.bytes)),
            number(each.exposed_ms),
            percent(each.share),
            printable(operations_text(each.operations, each.operation_exposed_ms)),
        )
        for each in groups[:MAX_LINES]
    ]
    names = ("calls", "bytes", "exposed ms", "share")
    columns = [TableColumn("group"), TableColumn("ranks"), *(TableColumn(name, right=True) for name in names)]
    more = [f"… and {len(groups) - MAX_LINES:,} groups more: --json"] if len(groups) > MAX_LINES else []
    return table_lines([*columns, TableColumn("operations")], rows, more)


def _checkpoint_lines(checkpoints: Sequence[SavedCheckpoint]) -> list[list[Piece]]:
    rows = [(f"{each.step:,}", size(each.bytes), "best" * each.best, printable(each.path)) for each in checkpoints]
    columns = [TableColumn("step", right=True), TableColumn("size", right=True), TableColumn(""), TableColumn("file")]
    more = [f"… and {len(rows) - MAX_LINES:,} more"] if len(rows) > MAX_LINES else []
    return table_lines(columns, rows[:MAX_LINES], more)


def _wrapped(text: str, style: str, width: int) -> list[list[Piece]]:
    return [[(line, style)] for line in wrapped(text, width)]


def _finding_lines(report: RunReport, width: int) -> list[list[Piece]]:
    """Return for each finding when it stood, and what it says; those that still stand first, by urgency."""
    severe = (each for each in report.findings if each.severity != "info")
    ordered = sorted(severe, key=lambda each: (1,) if each.cleared else (0, *urgency(each.kind, each.severity)))
    lines: list[list[Piece]] = []
    for each in ordered[:MAX_LINES]:
        stands = each.cleared is None
        style = "alarm" if stands else ""
        lines.append([("  " + _when(each, report.started), "dim"), (f"  {each.kind.replace('_', ' ')}", style)])
        lines += _wrapped(f"    {each.message}", "", width)
        if stands and each.advice:
            lines += _wrapped(f"    → {each.advice}", "accent", width)
    if len(ordered) > MAX_LINES:
        lines.append([(f"  … and {len(ordered) - MAX_LINES:,} findings more", "dim")])
    if report.earlier_findings:
        lines.append([("  … and earlier ones, which only the record has", "dim")])
    return lines


def _when(finding: FindingReport, started: float | None) -> str:
    if finding.step is not None:
        last = "to the end" if finding.cleared is None else "on, cleared"
        if finding.over_with:
            last = f"to the end of {finding.over_with}"
        elif finding.cleared_step is not None:
            last = f"to {finding.cleared_step:,}"
        return f"step {finding.step:,} {last}"
    if started is None:
        return "standing" if finding.cleared is None else "cleared"
    begin = duration(max(finding.time - started, 0.0))
    until = f", until the end of {finding.over_with}" if finding.over_with else ""
    lasted = f", for {duration(finding.cleared - finding.time)}" if finding.cleared else ""
    return f"after {begin}{until or lasted}"


def _hosts(hosts: Sequence[HostHardware]) -> list[str]:
    """Return a line for each host, and the versions once for those that have the same."""
    lines = []
    of_versions: dict[str, list[str]] = {}
    for host in hosts:
        cores = "" if host.cores is None else f"{host.cores} cores"
        if host.machine_cores not in (None, host.cores):
            cores += f" of {host.machine_cores}"
        parts = [cores, size(host.memory_total_bytes)]
        if host.gpus:
            memory = {size(gpu.memory_total_bytes) for gpu in host.gpus} - {""}
            parts.append(
                f"{len(host.gpus)} GPU{'s' * (len(host.gpus) > 1)}" + f" of {', '.join(memory)}" * bool(memory)
            )
        lines.append(f"  {host.host}  {', '.join(filter(None, parts))}")
        if host.versions:
            text = ", ".join(f"{name} {version}" for name, version in host.versions.items())
            of_versions.setdefault(text, []).append(host.host)
    versions = [
        "  " + text if len(of_versions) == 1 else f"  {cut(', '.join(names), 40)}  {text}"
        for text, names in of_versions.items()
    ]
    return _limited(lines, "hosts") + _limited(versions, "versions")


def _changes(report: RunReport) -> list[list[Piece]]:
    if not report.changes:
        return [[("  the same", "")]]
    pairs = [(each.key, cut_apart([each.before, each.now], 40)) for each in report.changes]
    texts = [f"  {key}  {before or '–'} → {now or '–'}" for key, (before, now) in pairs]
    return [[(text, "")] for text in _limited(texts, "keys")]


def _limited(texts: list[str], noun: str) -> list[str]:
    if len(texts) <= MAX_LINES:
        return texts
    return [*texts[:MAX_LINES], f"  … and {len(texts) - MAX_LINES:,} {noun} more"]
