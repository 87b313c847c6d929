"""The report of a run as data: ``gputrain report --json`` prints it, text and page show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

import msgspec

from gputrain_tui.diagnosis.roll_up import newest_findings, past_lasting
from gputrain_tui.report.report_fields import (
    FindingReport,
    HostHardware,
    RankSummary,
    RunFacts,
    RunReport,
    StepPart,
    ValidationReport,
    Verdict,
)
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.figures import mean_phase_ms, mean_share, run_groups, run_throughput
from gputrain_tui.state.finding_text import failure_summary, failure_words
from gputrain_tui.state.newest_metrics import newest_values
from gputrain_tui.state.totals import PHASES, Totals
from gputrain_tui.tables import duration
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import Finding


def run_report(state: RunState, facts: RunFacts) -> RunReport:
    """Return the report of a run from its state."""
    figures = state.figures
    return RunReport(
        **msgspec.structs.asdict(facts),
        step=figures.step or None,
        counts_anew=state.counts_anew,
        epoch=figures.epoch,
        world_size=state.world_size,
        verdict=verdict(state, facts),
        step_ms=figures.step_ms,
        parts=step_parts(view.sums for view in state.ranks.values()),
        means_over="all steps" if state.ended is not None else f"the {state.span}",
        groups=tuple(run_groups(state.ranks.values())),
        samples_per_s=figures.samples_per_s,
        steps_per_s=figures.steps_per_s,
        tokens_per_s=figures.tokens_per_s,
        mfu=figures.mfu,
        ranks=_ranks(state),
        shares=state.shares.described(),
        parameters_equal=None if state.desync.divided or state.world_size == 1 else state.desync.equal,
        loss=figures.loss,
        loss_unit=state.loss_unit,
        validations=tuple(
            ValidationReport(
                split=each.split,
                step=each.step,
                loss=_finite(each.loss),
                metrics={name: _finite(value) for name, value in each.metrics.items()},
            )
            for each in state.validations
        ),
        best_valid=state.validations.best,
        metrics={name: _finite(value) for name, value in newest_values(state.metrics, state.validations).items()},
        findings=tuple(past_findings(state)),
        earlier_findings=len(state.past_findings) == state.past_findings.maxlen,
        attempts=tuple(each.message for each in state.past_findings if each.kind == RESTARTED),
        hosts=_hosts(state),
    )


def step_parts(all_sums: Iterable[Totals]) -> tuple[StepPart, ...]:
    """Return the mean of each measured phase over the steps of which every phase was measured, in their order."""
    measured = [sums for sums in all_sums if sums.whole_steps]
    parts = []
    for phase in PHASES:
        share, ms = mean_share(measured, phase), mean_phase_ms(measured, phase)
        if share is not None and ms is not None:
            parts.append(StepPart(name=phase, ms=ms, share=share))
    return tuple(parts)


def verdict(state: RunState, facts: RunFacts) -> Verdict:
    """Return what limits the run: its failure, else its gravest finding, else the largest part of its steps.

    A finding counts that stands, or stood for more than half of the steps.
    """
    failure = state.root_cause
    if facts.state == "failed" and failure is not None:
        text = f"{failure_summary(failure)}: {failure.message}"
        cause = failure_words(failure)
        return Verdict(kind="failure", text=text, is_problem=True, rank=failure.rank, host=failure.host, cause=cause)
    if facts.state == "failed" and facts.message:  # the record lacks the failure, as on a full disk
        who = {"rank": facts.failed_rank, "host": facts.failed_host}
        return Verdict(kind="failure", text=facts.message, is_problem=True, **who)  # type: ignore[arg-type]
    lasting = [each for each, stands in newest_findings(state) if each.severity != "info" and stands]
    if lasting:
        return _verdict_of(lasting[0], lasting[0].message)
    for longest, steps in past_lasting(state):
        if longest.severity != "info":
            text = f"{longest.message}; so it was for {steps:,} of {state.step:,} steps, until step {longest.step:,}"
            return _verdict_of(longest, text)
    largest = _largest_part(state)
    return msgspec.structs.replace(largest, text=largest.text + _outside_of_steps(state, facts.duration_s))


def _verdict_of(finding: Finding, text: str) -> Verdict:
    kind, rank, host, cause = finding.kind, finding.rank, finding.host, finding.cause
    advice = finding.advice or None
    return Verdict(kind=kind, text=text, is_problem=True, rank=rank, host=host, cause=cause, advice=advice)


BOUND = {
    "data": ("input-bound", "waiting for data and copying it takes"),
    "compute": ("compute-bound", "forward and backward take"),
    "sync": ("communication-bound", "waiting for the gradient synchronisation takes"),
    "optimizer": ("optimizer-bound", "the optimizer takes"),
    "other": ("bound by its own code", "what is outside of all phases takes"),
}
"""By the largest part of a step: what the run is bound by, and what takes the time."""


def _largest_part(state: RunState) -> Verdict:
    parts = step_parts(view.sums for view in state.ranks.values())
    if not parts:
        if (unseen := state.unmeasured) is not None:
            return Verdict(kind="unmeasured", text=unseen.message, advice=unseen.advice or None)
        return Verdict(
            kind="unmeasured", text="no phase of a step was measured" if state.step else "no step was recorded"
        )
    shares: dict[str, float] = {}
    for part in parts:
        name = "compute" if part.name in ("forward", "backward") else part.name
        shares[name] = shares.get(name, 0.0) + part.share
    largest = max(shares, key=lambda name: shares[name])
    bound, takes = BOUND[largest]
    step_ms = state.figures.step_ms
    last = _last_rank(state, shares[largest]) if largest == "sync" else None
    if last is not None:
        bound, takes = "bound by its slowest ranks", f"waiting for other ranks, least on rank {last}, takes"
    of = "" if step_ms is None else f" of {step_ms:.1f} ms"
    return Verdict(
        kind=largest, text=f"{bound}: {takes} {100 * shares[largest]:.0f} % of a step{of}; no finding stands"
    )


def _outside_of_steps(state: RunState, duration_s: float | None) -> str:
    """Return what else takes more than half of the run's time; empty where that is steps, or is not known."""
    stepping_s = run_throughput(state.ranks.values()).stepping_s
    if not stepping_s or duration_s is None or stepping_s >= duration_s / 2 or state.record_gap:
        return ""
    return (
        f"; but only {duration(stepping_s)} of {duration(duration_s)} are steps: starting, and evaluations, "
        "checkpoints and other code between steps, take the rest"
    )


def _last_rank(state: RunState, mean_sync_share: float) -> int | None:
    """Return the rank that waits far less than the others do on average: it is they who wait, not the network."""
    parts = {rank: step_parts([view.sums]) for rank, view in state.ranks.items()}
    waits = {rank: sum(part.share for part in of if part.name == "sync") for rank, of in parts.items() if of}
    last = min(waits, key=waits.__getitem__)
    return last if len(waits) > 1 and waits[last] < mean_sync_share / 2 else None


def past_findings(state: RunState) -> list[FindingReport]:
    """Return each finding from when it was raised until it was cleared, by the time at which it was raised.

    One that is raised again before it is cleared goes on, with its newest words. One about a rank that the run no
    longer has was over at the last attempt's begin, or is over now.
    """
    done: list[FindingReport] = []
    standing: dict[tuple[str, int | None], FindingReport] = {}
    restarted = 0.0
    for event in state.past_findings:
        if event.kind == RESTARTED:
            restarted = event.time
            continue
        key = event.kind, event.rank
        before = standing.pop(key, None)
        if event.state == "cleared":
            if before is not None:
                over_with = state.ended_attempts.over_with(event) or None
                done.append(
                    msgspec.structs.replace(before, cleared=event.time, cleared_step=event.step, over_with=over_with)
                )
            continue
        raised = event if before is None else before
        newest = msgspec.convert(event, FindingReport, from_attributes=True)
        newest = msgspec.structs.replace(newest, time=raised.time, step=raised.step, advice=event.advice or None)
        standing[key] = newest
    last = max((event.time for event in state.past_findings), default=0.0)
    for key, each in standing.items():
        over = restarted if restarted >= each.time else last
        done.append(each if key in state.findings else msgspec.structs.replace(each, cleared=over))
    return sorted(done, key=lambda each: each.time)


def _ranks(state: RunState) -> tuple[RankSummary, ...]:
    late = state.lateness()
    named: dict[int, list[str]] = {}
    for finding, stands in newest_findings(state):
        for rank in {*finding.ranks, finding.rank} if stands else ():
            if rank is not None:
                named.setdefault(rank, []).append(finding.kind)
    return tuple(_rank(view, late, named) for view in state.ranks.values())


def _rank(view: RankView, late: Mapping[int, float], named: Mapping[int, Sequence[str]]) -> RankSummary:
    return RankSummary(
        rank=view.rank,
        host=view.host,
        device=view.device,
        outcome=view.outcome,
        steps=view.totals.steps,
        share=view.share,
        loss=view.loss,
        samples_per_s=view.totals.samples_per_s,
        step_ms=view.totals.mean_step_ms,
        late_ms=late.get(view.rank),
        parts=step_parts([view.totals]),
        memory_peak_bytes=view.memory_peak_bytes,
        findings=tuple(named.get(view.rank, ())),
    )


def _hosts(state: RunState) -> tuple[HostHardware, ...]:
    versions = {view.host: view.versions for view in state.ranks.values() if view.versions}
    samples = (sample for _, sample in sorted(state.nodes.items()))
    hosts = (msgspec.convert(sample, HostHardware, from_attributes=True) for sample in samples)
    return tuple(msgspec.structs.replace(host, versions=versions.get(host.host, {})) for host in hosts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
