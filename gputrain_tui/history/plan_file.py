"""Reads ``plan.json``, ``slurm.json`` and ``submission.json`` of a run directory."""

from __future__ import annotations

import math

import msgspec

from gputrain_tui.plan.planner import Plan, stop_grace
from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.numbers import Count
from trainer.contract.record.regular_file import read_json


class SlurmJob(msgspec.Struct, kw_only=True):
    """Contents of ``slurm.json``: the Slurm job of a run."""

    number: Count
    partition: str = ""
    nodes: list[str] = []
    """Its hosts in the order of the plan; empty before Slurm has chosen them."""
    batch: bool = False
    """Whether the run's supervisor is the job's script."""
    earlier: list[Count] = []
    """Numbers of the jobs before, each of which has submitted the next."""
    excluded: list[str] = []
    """Hosts that failed, which Slurm is asked to leave out."""


class SlurmSubmission(msgspec.Struct, kw_only=True):
    """Contents of ``submission.json``: what ``sbatch`` was given for the job of a run."""

    arguments: list[str]
    script: str


_submission = msgspec.json.Decoder(SlurmSubmission)


def read_submission(run: RunDir) -> SlurmSubmission | None:
    """Read what ``sbatch`` was given; None where a run was not submitted."""
    try:
        return read_json(run.submission, _submission)
    except RecordError:
        return None


_job = msgspec.json.Decoder(SlurmJob)


def read_job(run: RunDir) -> SlurmJob | None:
    """Read the Slurm job of a run; None where it has none."""
    try:
        return read_json(run.slurm, _job)
    except RecordError:
        return None


_plan = msgspec.json.Decoder(Plan)


def read_plan(run: RunDir) -> Plan:
    """Read ``plan.json`` and check that its nodes have all ranks from 0 to its world size in order.

    Raises:
        RecordError: it cannot be read, or is damaged.
    """
    plan = read_json(run.plan, _plan)
    if [rank for node in plan.nodes for rank in node.ranks] != list(range(plan.world_size)):
        raise RecordError(f"{run.plan} is damaged: its nodes do not cover the ranks 0 to {plan.world_size - 1}")
    for index, node in enumerate(plan.nodes):
        try:
            is_valid = node.node == index and node.argv and 0 <= stop_grace(node.argv) < math.inf
        except (ValueError, IndexError):
            is_valid = False
        if not is_valid:
            raise RecordError(f"{run.plan} is damaged: node {index} has no valid command")
    return plan
