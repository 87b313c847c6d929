"""The report of a run as data: ``gputrain report --json`` prints it, text and page show it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1
"""Changes when a key goes or changes its meaning, not when one is added."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What limits the run, in one line."""

    kind: str
    """Kind of the finding that decides, such as ``straggler``; ``failure``; ``compute`` where nothing is found."""
    text: str
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    advice: str | None = None


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the mean step."""

    name: str
    """``data``, ``copy``, ``forward``, ``backward``, ``sync`` (exposed), ``optimizer`` or ``other``."""
    ms: float
    share: float
    """Of the step, 0 to 1."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a rank over the whole run: those of the closing table."""

    rank: int
    host: str | None = None
    device: str | None = None
    outcome: str | None = None
    steps: int = 0
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
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    advice: str | None = None
    evidence: dict[str, float] = msgspec.field(default_factory=dict)


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A validation or test."""

    split: str
    step: int
    loss: float | None
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)


class RecipeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe key with another value than in the run before of the same recipe."""

    key: str
    before: str
    now: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run; every figure is the one that console, closing table and ``runs --json`` show."""

    schema_version: int = SCHEMA_VERSION
    id: str
    recipe: str
    state: str
    """``running``, ``finished``, ``failed``, ``stopped``, ``lost`` and so on."""
    exit_code: int | None = None
    message: str | None = None
    started: float | None = None
    ended: float | None = None
    duration_s: float | None = None
    step: int = 0
    epoch: int = 0
    world_size: int
    run_dir: str
    verdict: Verdict
    step_ms: float | None = None
    parts: tuple[StepPart, ...] = ()
    """Means over all ranks; their shares add up to 1 where all are measured."""
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    ranks: tuple[RankReport, ...] = ()
    loss: float | None = None
    loss_unit: str = ""
    validations: tuple[ValidationReport, ...] = ()
    findings: tuple[FindingReport, ...] = ()
    """By the time at which each was raised."""
    hosts: tuple[dict[str, Any], ...] = ()
    """Hardware of each host, as its agent reported it."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    recipe_values: dict[str, str] = msgspec.field(default_factory=dict)
    previous_run: str | None = None
    changes: tuple[RecipeChange, ...] = ()
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    """Newest value of each metric of the user's own."""
    gaps: tuple[str, ...] = ()
    """Where the record is not whole."""
