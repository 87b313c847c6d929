"""Findings and failures in a few words, and the mark of a run with findings that stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gputrain_tui.tables import ranks_text
from trainer.contract.record import Failure, Finding

SIGNAL = re.compile(r"\bSIG[A-Z0-9]+\b|\bsignal \d+\b")


def failure_words(failure: Failure) -> str:
    """Return the kind of a failure in words, such as ``out of memory``; of a signal with its name."""
    if failure.kind == "signal":
        signal = SIGNAL.search(failure.message)
        return f"killed ({signal[0]})" if signal else "killed"
    return "exited" if failure.kind == "exit" else failure.kind.replace("_", " ")


SEVERITIES = ("critical", "warning", "info")
"""From the most urgent one."""
FIRST_KINDS = ("stalled", "host_silent", "non_finite", "desync", "checkpoint_lost", "record_incomplete")
"""Kinds that come before those that only slow a run: it stands still, learns nothing, its work is not kept, or its
figures are partial."""
CAUSES = {
    "data": "data loading",
    "h2d": "copying batches",
    "batch": "between batch and forward",
    "loss": "between batch and backward",
    "gradients": "between backward and step",
    "other": "between two steps",
    "compile": "compiling",
    "threads": "threads of an ended script",
    "garbage_collection": "garbage collection",
    "cpu_steal": "stolen CPU time",
    "core_wait": "no free core",
    "cpu_quota": "cpu quota",
    "gpu_clock": "GPU clock",
    "gpu_thermal": "GPU heat",
    "collectives": "different collectives",
    "unattributed": "",
}
"""Texts of causes, where the identifier does not read well."""
WORDS = {
    "input_bound": "waits for data",
    "communication_bound": "waits for the network",
    "cpu_contention": "too few cores",
    "cpu_quota": "too small a cpu quota",
    "gpu_throttled": "GPU throttled",
    "imbalance": "uneven work",
    "uneven_speeds": "uneven speeds",
    "memory_creep": "memory grows",
    "non_finite": "NaN or infinite",
    "non_finite_validation": "validation is NaN",
    "host_silent": "is silent",
    "loss_spike": "the loss jumped",
    "outside_torch": "time outside torch",
    "slow_evaluation": "slow in evaluations",
    "periodic_delay": "slow now and then",
    "stalled": "stalled",
    "desync": "parameters differ",
    "no_process_group": "ranks never meet",
    "metric_is_mean": "a metric divided twice",
    "record_incomplete": "the record is incomplete",
    "checkpoint_lost": "a checkpoint was not written",
    "other_thread": "a second thread not measured",
}
"""Texts of kinds of findings, where the identifier does not read well."""
NO_STEPS, NO_LOSS, NO_SAMPLES = "no_steps", "no_loss", "no_samples"
"""Causes of ``not_measured``: no step of a script is seen, or no loss or no samples of its steps."""
HOST_KINDS = ("cpu_contention", "gpu_throttled", "host_silent")
"""Kinds of findings about a host; their rank is the host's first one."""


def finding_summary(finding: Finding) -> str:
    """Return a finding in a few words: rank or host, problem, and after a colon the cause."""
    subject = _subject(finding)
    cause = CAUSES.get(finding.cause or "", (finding.cause or "").replace("_", " "))
    if finding.kind != "straggler":
        by_cause = (finding.kind, finding.cause) in (("cpu_contention", "cpu_quota"), ("not_measured", "other_thread"))
        kind = finding.cause if by_cause and finding.cause else finding.kind
        text = subject + WORDS.get(kind, kind.replace("_", " "))
        at = f" ({finding.line})" if finding.line else ""
        return f"{text}: {cause}{at}" if finding.kind == "stalled" and cause else text
    if finding.cause == "other":
        cause = "its own code"
    excess_ms = finding.evidence.get("excess_ms")
    slow = "slow" if excess_ms is None else f"slow +{excess_ms:.0f} ms"
    return f"{subject}{slow}" + (f": {cause}" if cause else "")


def _subject(finding: Finding) -> str:
    """Return the subject of a finding and a blank: a rank, ranks of a node, or a host; empty for the run."""
    if finding.rank is None or finding.kind in ("record_incomplete", "not_measured", "checkpoint_lost"):
        return ""
    if finding.kind in HOST_KINDS and finding.host:
        return f"{finding.host} "
    if finding.kind in ("straggler", "non_finite") and finding.ranks:
        return f"{_few_ranks(finding.ranks)} "
    ranks = finding.evidence.get("ranks", 1) if finding.kind == "straggler" else 1
    return f"{ranks:.0f} ranks of {finding.host or 'a node'} " if ranks > 1 else f"rank {finding.rank} "


def _few_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2, 4, … (16)``, which fits in the header of a narrow console."""
    return ranks_text(ranks, limit=3)


def failure_step(failure: Failure) -> str:
    """Return the step of a failure, such as `` in step 50``, which is not done, or `` after step 49``, which is."""
    if failure.in_step is not None:
        return f" in step {failure.in_step:,}"
    if failure.step is None:
        return ""
    return f" after step {failure.step:,}" if failure.step else " before step 1"


def failure_summary(failure: Failure) -> str:
    """Return a failure in a few words: rank, kind and step."""
    who = f"rank {failure.rank} " if failure.rank is not None else ""
    return who + failure_words(failure) + failure_step(failure)


def is_cause(finding: Finding, failure: Failure | None) -> bool:
    """Whether a finding is what a run has failed for, as far as its kind shows."""
    if failure is None:
        return False
    causes = {"out_of_memory": "memory_creep", "node_lost": "host_silent", "training": "desync"}
    same_rank = None in (finding.rank, failure.rank) or finding.rank == failure.rank
    return finding.kind == causes.get(failure.kind, failure.kind) and same_rank


def by_urgency(finding: Finding) -> tuple[bool, bool, int, int, float]:
    """Return the sort key of findings in every view: what stands, by ``urgency``; of equals the slowest rank first."""
    is_over = finding.state == "cleared"
    return is_over, *urgency(finding.kind, finding.severity), -finding.evidence.get("excess_ms", 0.0)


def urgency(kind: str, severity: str) -> tuple[bool, int, int]:
    """Return the place of a finding: what stops a run before what slows it, then by severity; ``info`` comes last."""
    first = FIRST_KINDS.index(kind) if kind in FIRST_KINDS else len(FIRST_KINDS)
    return severity == "info", first, SEVERITIES.index(severity) if severity in SEVERITIES else 1


def marking(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that mark a run: all but those that only inform, the most urgent first."""
    return sorted((finding for finding in findings if finding.severity != "info"), key=by_urgency)


def run_mark(findings: Iterable[Finding]) -> str:
    """Return the findings of a run in a few words, such as ``NaN since step 60 on rank 1``; empty without any."""
    if not (standing := marking(findings)):
        return ""
    first, *others = standing
    more = f" and {len(others):,} more finding{'s' * (len(others) > 1)}" if others else ""
    return f"{_state(first)}{more}"


def _state(finding: Finding) -> str:
    if finding.kind != "non_finite":
        until = f", until step {finding.step:,}" if finding.state == "cleared" and finding.step is not None else ""
        return finding_summary(finding) + until
    since = f" since step {finding.step:,}" if finding.step is not None else ""
    on = f" on {_few_ranks(finding.ranks or [finding.rank])}" if finding.rank is not None else ""
    return f"NaN{since}{on}"


def restarts_text(restarts: int) -> str:
    """Return the number of restarts as the end of a phrase, such as `` after 2 restarts``; empty for none."""
    return f" after {restarts} restart{'s' * (restarts != 1)}" if restarts else ""


def named_ranks(findings: Iterable[Finding]) -> set[int]:
    """Return the ranks that findings are about."""
    of_each = ([*finding.ranks, finding.rank] for finding in findings)
    return {rank for ranks in of_each for rank in ranks if rank is not None}


def loss_is_nan(findings: Iterable[Finding]) -> bool:
    """Whether the ranks' losses are known not to be numbers: the record leaves such values out."""
    return any(finding.kind == "non_finite" and finding.cause == "loss" for finding in findings)


def nan_since(root_cause: Failure | None, findings: Iterable[Finding]) -> int | None:
    """Return the step from which no loss of a run is a number; None where all are, as far as the record tells.

    A task fails at that step; a script goes on, with a finding that stands: also one about the gradient norm, as the
    weights are NaN once such a step is applied. ``findings`` are those that stand.
    """
    if root_cause is not None and root_cause.kind == "non_finite":
        return root_cause.step
    return min((each.step for each in findings if each.kind == "non_finite" and each.step is not None), default=None)
