"""The report of a run as data: ``gputrain report --json`` prints it, text and page show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

import msgspec

from gputrain_tui.diagnosis.roll_up import newest_findings
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.figures import GroupFigures, mean_phase_ms, mean_share, run_groups
from gputrain_tui.state.finding_text import failure_summary, failure_words
from gputrain_tui.state.newest_metrics import newest_values
from gputrain_tui.state.share_changes import SharesFromStep
from gputrain_tui.state.totals import PHASES, Totals
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import NodeSample


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What limits the run, in one line."""

    kind: str
    """Kind of the finding that decides, such as ``straggler``; ``failure``; ``compute`` where nothing is found."""
    text: str
    is_problem: bool = False
    """Whether it is a failure or a finding, not the largest part of a sound run's steps."""
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    advice: str | None = None


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the mean step."""

    name: str
    """``data`` (waiting for a batch and copying it), ``forward``, ``backward``, ``sync`` (exposed gradient
    synchronisation), ``optimizer`` or ``other``."""
    ms: float
    share: float
    """Of the step, 0 to 1."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a rank over the whole run: those of the closing table."""

    rank: int
    host: str | None = None
    device: str | None = None
    outcome: str | None = None
    steps: int = 0
    share: int | None = None
    """Its samples or tokens of the global batch; None where shares are not balanced."""
    loss: float | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    late_ms: float | None = None
    """Time that the others wait for it a step; None where ranks do not wait for each other."""
    parts: tuple[StepPart, ...] = ()
    memory_peak_bytes: int | None = None
    findings: tuple[str, ...] = ()
    """Kinds of the findings that name it."""


class FindingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with the time and step at which it was raised, and at which it was cleared."""

    kind: str
    severity: str
    message: str
    time: float
    step: int | None = None
    cleared: float | None = None
    cleared_step: int | None = None
    over_with: str | None = None
    """The attempt that it was over with, such as ``attempt 1``; None where it stands, or is cleared otherwise."""
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    advice: str | None = None
    evidence: dict[str, float] = msgspec.field(default_factory=dict)


class HostHardware(msgspec.Struct, frozen=True, kw_only=True):
    """A host as its node agent saw it last."""

    host: str
    node: int
    cores: int | None = None
    """Logical cores that the ranks may use."""
    machine_cores: int | None = None
    memory_total_bytes: int | None = None
    gpus: tuple[GpuCard, ...] = ()
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """By name, such as ``torch``; empty in records of before they were kept."""


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a host."""

    index: int
    uuid: str
    memory_total_bytes: int | None = None


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A validation or test."""

    split: str
    step: int
    loss: float | None
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run that is still there."""

    step: int
    path: str
    """``HOST:PATH`` on another host, which was not asked for it."""
    bytes: int
    best: bool


class RecipeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe key with another value than in the run before of the same recipe."""

    key: str
    before: str
    now: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run; every figure is the one that console, closing table and ``runs --json`` show."""

    schema_version: int = 1
    """Changes when a key goes or changes its meaning, not when one is added."""
    id: str
    recipe: str
    state: str
    """``running``, ``finished``, ``failed``, ``stopped``, ``lost`` and so on."""
    exit_code: int | None = None
    message: str | None = None
    started: float | None = None
    ended: float | None = None
    duration_s: float | None = None
    """Until now, or the end."""
    step: int = 0
    epoch: int = 0
    world_size: int
    run_dir: str
    verdict: Verdict
    step_ms: float | None = None
    parts: tuple[StepPart, ...] = ()
    """Means over all ranks; their shares add up to 1 where all are measured."""
    means_over: str = ""
    """Steps that these means, durations and rates are over, in words."""
    groups: tuple[GroupFigures, ...] = ()
    """Those in which ranks wait longest first."""
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    ranks: tuple[RankSummary, ...] = ()
    shares: tuple[SharesFromStep, ...] = ()
    """The newest changes of the ranks' shares, the oldest first; none where shares are not balanced."""
    parameters_equal: bool | None = None
    """Whether they were at the last comparison of all ranks; None before it, and where each rank has a part of them."""
    loss: float | None = None
    loss_unit: str = ""
    validations: tuple[ValidationReport, ...] = ()
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    """The user's own by name: the newest values, over the ranks that report them; null: not finite."""
    findings: tuple[FindingReport, ...] = ()
    """By the time at which each was raised."""
    earlier_findings: bool = False
    """Whether there were more, of which the newest are kept."""
    attempts: tuple[str, ...] = ()
    """How each attempt before the last one ended."""
    hosts: tuple[HostHardware, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    """Newest first."""
    previous_run: str | None = None
    """Id of the run before of the same recipe; None where there is none."""
    changes: tuple[RecipeChange, ...] = ()
    """What its recipe had otherwise."""
    record_gap: str | None = None
    """Why the record is not whole; None where it is."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a report has that is not in the events: of the status and the recipes."""

    id: str
    recipe: str
    state: str
    run_dir: str
    exit_code: int | None = None
    message: str | None = None
    started: float | None = None
    ended: float | None = None
    duration_s: float | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    previous_run: str | None = None
    changes: tuple[RecipeChange, ...] = ()
    record_gap: str | None = None


def run_report(state: RunState, facts: RunFacts) -> RunReport:
    """Return the report of a run from its state."""
    figures = state.figures
    return RunReport(
        **msgspec.structs.asdict(facts),
        step=figures.step,
        epoch=figures.epoch,
        world_size=state.world_size,
        verdict=verdict(state, facts.state),
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


def verdict(state: RunState, status: str) -> Verdict:
    """Return what limits the run: its failure, else its gravest finding, else the largest part of its steps.

    A finding counts that stands, or stood for more than half of the steps.
    """
    failure = state.root_cause
    if status == "failed" and failure is not None:
        text = f"{failure_summary(failure)}: {failure.message}"
        return Verdict(
            kind="failure",
            text=text,
            is_problem=True,
            rank=failure.rank,
            host=failure.host,
            cause=failure_words(failure),
        )
    lasting = [each for each, stands in newest_findings(state) if each.severity != "info" and stands]
    if lasting:
        worst = lasting[0]
        return Verdict(
            kind=worst.kind,
            text=worst.message,
            is_problem=True,
            rank=worst.rank,
            host=worst.host,
            cause=worst.cause,
            advice=worst.advice or None,
        )
    stood = [each for each in past_findings(state) if each.severity != "info"]
    longest = max(stood, key=_steps_stood, default=None)
    if longest is not None and (steps := _steps_stood(longest)) > state.step / 2:
        return Verdict(
            kind=longest.kind,
            text=f"{longest.message}; so it was for {steps:,} of {state.step:,} steps, until step "
            f"{longest.cleared_step:,}",
            is_problem=True,
            rank=longest.rank,
            host=longest.host,
            cause=longest.cause,
            advice=longest.advice,
        )
    return _largest_part(state)


def _steps_stood(finding: FindingReport) -> int:
    """Return for how many steps a finding stood that is cleared; 0 where that is not known."""
    if finding.step is None or finding.cleared_step is None:
        return 0
    return finding.cleared_step - finding.step


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
        standing[key] = FindingReport(
            kind=event.kind,
            severity=event.severity,
            message=event.message,
            time=event.time if before is None else before.time,
            step=event.step if before is None else before.step,
            rank=event.rank,
            host=event.host,
            cause=event.cause,
            advice=event.advice or None,
            evidence=dict(event.evidence),
        )
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
    return tuple(_host(state.nodes[node], versions.get(state.nodes[node].host, {})) for node in sorted(state.nodes))


def _host(sample: NodeSample, versions: dict[str, str]) -> HostHardware:
    return HostHardware(
        versions=versions,
        host=sample.host,
        node=sample.node,
        cores=sample.cores,
        machine_cores=sample.machine_cores,
        memory_total_bytes=sample.memory_total_bytes,
        gpus=tuple(
            GpuCard(index=gpu.index, uuid=gpu.uuid, memory_total_bytes=gpu.memory_total_bytes) for gpu in sample.gpus
        ),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
