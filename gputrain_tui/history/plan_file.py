"""Reads ``plan.json`` of a run directory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gputrain_tui.plan.planner import Plan, stop_grace
from trainer.contract.errors import RecordError
from trainer.contract.record import MAX_RANKS, RunDir
from trainer.contract.record.regular_file import read_json

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
        if node.node != index or not node.argv or not 0 <= _stop_grace(node.argv) < math.inf:
            raise RecordError(f"{run.plan} is damaged: node {index} has no valid command")
    return plan


def _stop_grace(argv: Sequence[str]) -> float:
    try:
        return stop_grace(argv)
    except (ValueError, IndexError):
        return math.nan


def planned_world_size(run: RunDir) -> int:
    """Return the world size by a run's plan; the maximum where that cannot be read."""
    try:
        return read_plan(run).world_size
    except RecordError:
        return MAX_RANKS
