"""Renders the report of a run as text: what limits it first, then its steps, ranks, results and findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gputrain_tui.headless.closing_report import failure_block, result_lines, status_line
from gputrain_tui.headless.number_text import number, percent
from gputrain_tui.headless.progress import Piece
from gputrain_tui.report.run_report import FindingReport, HostHardware, RunReport
from gputrain_tui.state import RunState
from gputrain_tui.tables import TableColumn, cut, duration, size, table

MAX_LINES = 12
"""Maximum lines of a list, so that the report stays a page."""
BAR_CELLS = 30
NAMES = {"data": "data and copies", "sync": "exposed synchronisation", "other": "outside of all phases"}
"""Names of the parts of a step, where the identifier does not read well."""


def report_lines(report: RunReport, state: RunState, width: int) -> list[list[Piece]]:
    """Return the report in lines of about ``width`` cells; messages are never cut."""
    lines: list[list[Piece]] = [[(report.id, "bold"), ("  ", ""), *status_line(state)]]
    lines.append([(report.verdict.text, "alarm" if report.verdict.is_problem else "bold")])
    if report.verdict.advice:
        lines.append([(f"→ {report.verdict.advice}", "accent")])
    if report.record_gap:
        lines.append([("record     ", "dim"), (report.record_gap, "alarm")])
    for text in _limited([*report.attempts][::-1], "attempts before"):
        lines.append([("attempt    ", "dim"), (text, "")])
    if state.root_cause is not None and report.state == "failed":
        lines += [[], *failure_block(state.root_cause, (), "")]
    if report.parts:
        lines += [[], [("where a step's time goes", "bold")], *_part_lines(report)]
    if state.step or state.validations:
        lines += [[], [("ranks and results", "bold")], *result_lines(state, width)]
    if report.findings:
        lines += [[], [("what was found, and when", "bold")], *_finding_lines(report.findings, report.started)]
    if report.hosts:
        lines += [[], [("hardware", "bold")], *([(text, "")] for text in _limited(list(_hosts(report.hosts)), "hosts"))]
    if report.software:
        lines += [[], [("software", "bold")], *([(text, "")] for text in _limited(_software(report), "kinds of hosts"))]
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
    title, *texts = table(columns, rows).splitlines()
    return [[("  " + title, "dim")], *([("  " + text, "")] for text in texts)]


def _finding_lines(findings: Sequence[FindingReport], started: float | None) -> list[list[Piece]]:
    """Return two lines for each finding: when it stood, and what it says; those that still stand first."""
    ordered = sorted((each for each in findings if each.severity != "info"), key=lambda each: each.cleared is not None)
    lines: list[list[Piece]] = []
    for each in ordered[:MAX_LINES]:
        stands = each.cleared is None
        style = "alarm" if stands else ""
        lines.append([("  " + _when(each, started), "dim"), (f"  {each.kind.replace('_', ' ')}", style)])
        lines.append([(f"    {each.message}", "")])
        if stands and each.advice:
            lines.append([(f"    → {each.advice}", "accent")])
    if len(ordered) > MAX_LINES:
        lines.append([(f"  … and {len(ordered) - MAX_LINES:,} findings more", "dim")])
    return lines


def _when(finding: FindingReport, started: float | None) -> str:
    if finding.step is not None:
        last = "to the end" if finding.cleared is None else "on, cleared"
        if finding.cleared_step is not None:
            last = f"to {finding.cleared_step:,}"
        return f"step {finding.step:,} {last}"
    if started is None:
        return "standing" if finding.cleared is None else "cleared"
    begin = duration(max(finding.time - started, 0.0))
    return f"after {begin}" + (f", for {duration(finding.cleared - finding.time)}" if finding.cleared else "")


def _hosts(hosts: Sequence[HostHardware]) -> Iterator[str]:
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
        yield f"  {host.host}  {', '.join(filter(None, parts))}"


def _software(report: RunReport) -> list[str]:
    texts = []
    for each in report.software:
        where = "" if len(report.software) == 1 else f"  on {cut(', '.join(each.hosts), 60)}"
        texts.append("  " + ", ".join(f"{name} {version}" for name, version in each.versions.items()) + where)
    return texts


def _changes(report: RunReport) -> list[list[Piece]]:
    if not report.changes:
        return [[("  the same", "")]]
    texts = [f"  {each.key}  {_value(each.before)} → {_value(each.now)}" for each in report.changes]
    return [[(text, "")] for text in _limited(texts, "keys")]


def _value(text: str) -> str:
    return cut(text, 40) or "–"


def _limited(texts: list[str], noun: str) -> list[str]:
    if len(texts) <= MAX_LINES:
        return texts
    return [*texts[:MAX_LINES], f"  … and {len(texts) - MAX_LINES:,} {noun} more"]
