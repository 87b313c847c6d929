"""What a report of a run holds, as ``gputrain report --json`` prints it. Its fields' texts are in ``--schema``."""

from __future__ import annotations

import msgspec

from gputrain_tui.state.best_validation import BestValidation
from gputrain_tui.state.figures import GroupFigures
from gputrain_tui.state.share_changes import SharesFromStep


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What limits the run, in one line."""

    kind: str
    """Kind of the finding that decides, such as ``straggler``; ``failure``; ``compute`` where nothing is found."""
    text: str
    """What it is, with its number."""
    is_problem: bool = False
    """Whether it is a failure or a finding, not the largest part of a sound run's steps."""
    rank: int | None = None
    """Rank that it is about; null if it is of a host or the run."""
    host: str | None = None
    """Its host."""
    cause: str | None = None
    """Cause of the finding, such as ``data``; of a failure its kind in words."""
    advice: str | None = None
    """What to do."""


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the mean step."""

    name: str
    """``data`` (waiting for a batch and copying it), ``forward``, ``backward``, ``sync`` (exposed gradient
    synchronisation), ``optimizer`` or ``other``."""
    ms: float
    """Mean duration."""
    share: float
    """Of the step, 0 to 1."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a rank over the whole run: those of the closing table."""

    rank: int
    """From 0 on."""
    host: str | None = None
    """Where it ran last."""
    device: str | None = None
    """``cpu``, or the GPU with its UUID or name."""
    outcome: str | None = None
    """``lost peer`` or ``stopped`` where others or the run ended it; null for the rank that failed, and for one that
    finished."""
    steps: int = 0
    """Recorded optimizer steps, of all attempts."""
    share: int | None = None
    """Its samples or tokens of the global batch; null where shares are not balanced."""
    loss: float | None = None
    """Mean over its last step; null if it is not finite."""
    samples_per_s: float | None = None
    """Per second of its steps; null where no samples are counted."""
    step_ms: float | None = None
    """Mean duration of a step."""
    late_ms: float | None = None
    """Time that the others wait for it a step; null where ranks do not wait for each other."""
    parts: tuple[StepPart, ...] = ()
    """Of its mean step."""
    memory_peak_bytes: int | None = None
    """Most memory of tensors on its GPU, or of its process."""
    findings: tuple[str, ...] = ()
    """Kinds of the findings that name it."""


class FindingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with the time and step at which it was raised, and at which it was cleared."""

    kind: str
    """Such as ``straggler``; ``gputrain help findings`` has all."""
    severity: str
    """``critical``, ``warning`` or ``info``."""
    message: str
    """In one line, with its numbers."""
    time: float
    """When it was raised, Unix seconds."""
    step: int | None = None
    """Step at which it was raised; null where it is of no step."""
    cleared: float | None = None
    """When it was cleared, Unix seconds; null while it stands."""
    cleared_step: int | None = None
    """Step at which it was cleared."""
    over_with: str | None = None
    """The attempt that it was over with, such as ``attempt 1``; null where it stands, or is cleared otherwise."""
    rank: int | None = None
    """Rank that it is about, or the first of several; null if it is of a host or the run."""
    host: str | None = None
    """Its host."""
    cause: str | None = None
    """Such as ``data`` or ``core_wait``."""
    advice: str | None = None
    """What to do."""
    evidence: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers by name that it was found by."""


class HostHardware(msgspec.Struct, frozen=True, kw_only=True):
    """A host as its node agent saw it last."""

    host: str
    """Its name."""
    node: int
    """Number of the node in the plan."""
    cores: int | None = None
    """Logical cores that the ranks may use."""
    machine_cores: int | None = None
    """Logical cores of the machine."""
    memory_total_bytes: int | None = None
    """Memory of the machine, or the limit of its container."""
    gpus: tuple[GpuCard, ...] = ()
    """Those that its node agent saw."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """By name, such as ``torch``; empty in records of before they were kept."""


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a host."""

    index: int
    """In PCI order."""
    uuid: str
    """As the driver names it."""
    memory_total_bytes: int | None = None
    """Its memory."""


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A validation or test."""

    split: str
    """``valid`` or ``test``."""
    step: int
    """Optimizer steps done."""
    loss: float | None
    """Mean over every example; null if it is not finite."""
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    """By name; null if one is not finite."""


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run that is still there."""

    step: int
    """Optimizer steps done."""
    path: str
    """``HOST:PATH`` on another host, which was not asked for it."""
    bytes: int
    """Its size."""
    best: bool
    """Whether it is that of the best validation."""


class RecipeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe key with another value than in the run before of the same recipe."""

    key: str
    """Such as ``train.lr``."""
    before: str
    """Value in the run before."""
    now: str
    """Value in this run."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a report has that is not in the events: of the status, the recipes and the disk."""

    schema_version: int = 1
    """Changes when a key goes or changes its meaning, not when one is added."""
    id: str
    """Of the run."""
    recipe: str
    """Name of its recipe."""
    state: str
    """``running``, ``finished``, ``failed``, ``stopped``, ``lost`` and so on."""
    exit_code: int | None = None
    """Of ``gputrain run``; null while it goes on."""
    message: str | None = None
    """Why it failed, was stopped or is lost."""
    failed_rank: int | None = None
    """Rank whose failure the message is about."""
    failed_host: str | None = None
    """Host of that failure."""
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds; null while it goes on."""
    duration_s: float | None = None
    """Until now, or the end."""
    jobs: int | None = None
    """Jobs of Slurm that have begun; steps, samples and rates are of all of them; null where it runs in none."""
    run_dir: str
    """Its folder."""
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    """Newest first."""
    previous_run: str | None = None
    """Id of the run before of the same recipe; None where there is none."""
    changes: tuple[RecipeChange, ...] = ()
    """What its recipe had otherwise."""
    record_gap: str | None = None
    """Why the record is not whole; None where it is."""


class RunReport(RunFacts, frozen=True, kw_only=True):
    """A run; every figure is the one that console, closing table and ``runs --json`` show."""

    step: int | None = None
    """Optimizer steps that all ranks have done; null before the first."""
    counts_anew: bool = False
    """Whether a script was started again, which counts its steps from 1 each time: ``step`` is of its last start, the
    steps of ``ranks`` are of all starts."""
    epoch: int = 0
    """From 1; 0 before the first step."""
    world_size: int
    """Ranks of the newest attempt."""
    verdict: Verdict
    """What limits it."""
    step_ms: float | None = None
    """Mean duration of a step."""
    parts: tuple[StepPart, ...] = ()
    """Means over all ranks; their shares add up to 1 where all are measured."""
    means_over: str = ""
    """Steps that these means, durations and rates are over, in words."""
    groups: tuple[GroupFigures, ...] = ()
    """Those in which ranks wait longest first."""
    samples_per_s: float | None = None
    """Of all ranks, per second of their steps; null where none are counted."""
    steps_per_s: float | None = None
    """Per second of stepping."""
    tokens_per_s: float | None = None
    """Of all ranks; null where none are counted."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1; null where it is not known."""
    ranks: tuple[RankSummary, ...] = ()
    """In their order."""
    shares: tuple[SharesFromStep, ...] = ()
    """The newest changes of the ranks' shares, the oldest first; none where shares are not balanced."""
    parameters_equal: bool | None = None
    """Whether they were at the last comparison of all ranks; null before it, and where each rank has a part of them."""
    loss: float | None = None
    """Mean over the ranks at the newest step; null if it is not finite or not known."""
    loss_unit: str = ""
    """Such as ``nats``; empty if none is known."""
    validations: tuple[ValidationReport, ...] = ()
    """In the order of the record, the newest ones of many."""
    best_valid: BestValidation | None = None
    """The best validation, by ``train.best_metric``."""
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    """The user's own by name: the newest values, over the ranks that report them; null: not finite."""
    findings: tuple[FindingReport, ...] = ()
    """By the time at which each was raised."""
    earlier_findings: bool = False
    """Whether there were more, of which the newest are kept."""
    attempts: tuple[str, ...] = ()
    """How each attempt before the last one ended."""
    hosts: tuple[HostHardware, ...] = ()
    """In the order of the nodes."""
