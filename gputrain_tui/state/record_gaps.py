"""Gaps of the record, told as findings: up to which step it reaches, why, and what was done since."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping

import msgspec

from trainer.contract.record import Finding
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE

FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
RECORD_ADVICE = (
    "free space on the disk of the run directory (GPUTRAIN_HOME); the training goes on without it, but checkpoints are "
    "lost unless train.save_dir is on another disk, and figures of the run are of the recorded part"
)
HOST_ADVICE = "free space on that disk; steps and samples are counted, other figures are of the recorded part"
UNWRITABLE_ADVICE = (
    "no checkpoint is saved on that disk either: stop the run, and resume it with a folder on another one, by "
    """--set 'cluster.env.GPUTRAIN_HOME="FOLDER"'"""
)
GROWTH = 1.1
"""Factor by which the missing steps must have grown to be recorded again while the gap lasts."""


def gap_text(findings: Mapping[tuple[str, int | None], Finding]) -> str:
    """Return why the record is incomplete, by the standing findings by kind and rank; empty where it is whole."""
    if (whole := findings.get((RECORD_INCOMPLETE, None))) is not None:
        return whole.message
    gaps = [each for each in findings.values() if each.kind == RECORD_INCOMPLETE and each.severity != "info"]
    return "; ".join(dict.fromkeys(each.message for each in gaps))


def gap_finding(told: Finding, host: str, others: Finding | None = None) -> Finding:
    """Return the finding of a gap that a rank has told; its ``cause`` is the error of writing, None once that goes on.

    ``host``: name of a host with a run directory of its own, empty for this one; ``others``: a standing gap of another
    rank of the node, whose disk is the same: this one only adds its counts then.
    """
    since = told.step or 0
    if others is not None:
        since = min(since, int(others.evidence.get("recorded_step", since)))
    whose = f"{host}'s record" if host else "the record"
    lacks = int(told.evidence.get("steps", 0))
    if told.state == "cleared":
        text = f"{whose} is written again and lacks no step, after it had ended at step {since}"
    elif told.message in FULL:
        text = f"{whose} ends at step {since}: {'its disk' if host else 'the disk of the run directory'} is full"
    elif told.message:
        text = f"{whose} ends at step {since}: {told.message}"
    else:
        text = f"{whose} is written again, but lacks {lacks:,} steps after step {since}"
    return msgspec.structs.replace(
        told,
        host=host or None,
        step=None,
        cause=told.message or None,
        severity="warning" if others is None else "info",
        message=text,
        evidence={**told.evidence, "recorded_step": told.step or 0},
        advice="" if told.state == "cleared" else HOST_ADVICE if host else RECORD_ADVICE,
    )


def unwritable_finding(rank: int, host: str, error: str, step: int) -> Finding:
    """Return the finding that the record of a host ends at a step by an error of its disk, or goes on without one."""
    return Finding(
        time=time.time(),
        kind=RECORD_INCOMPLETE,
        state="raised" if error else "cleared",
        rank=rank,
        host=host,
        severity="warning",
        cause=error or None,
        message=f"{host}'s record ends at step {step}: {error}" if error else f"{host}'s record is written again",
        evidence={"recorded_step": step},
        advice=UNWRITABLE_ADVICE if error else "",
    )


def is_news(told: Finding, before: Finding | None, *, is_last: bool) -> bool:
    """Whether what a rank tells of its gap is to be recorded, after what was recorded before."""
    if before is None or (told.state, told.message, told.step) != (before.state, before.message, before.step):
        return True
    if is_last:
        return told.evidence != before.evidence
    return told.evidence.get("steps", 0) >= GROWTH * before.evidence.get("steps", 0) + 1
