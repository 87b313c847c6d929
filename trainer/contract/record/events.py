"""Schema of the events.

A value that was not measured is absent, never 0; durations are milliseconds, sizes bytes.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Literal

import msgspec

from trainer.contract.record.collective_groups import CollectiveCall, GroupSync
from trainer.contract.record.numbers import (
    Count,
    ExitStatus,
    FiniteFloat,
    Rank,
    Result,
    StepNumber,
    StepsCovered,
    UnixSeconds,
    WorldSize,
    or_nan,
)

RankStateName = Literal["spawned", "joining", "ready", "training", "validating", "saving", "finished", "failed"]
"""State of a rank; a healthy run passes through them in this order."""
RunStatusName = Literal["queued", "starting", "running", "stopping", "finished", "failed", "stopped"]


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False, tag_field="type", tag="event"):
    """Event of the record: one JSON line, tagged by ``type``."""

    time: UnixSeconds
    """Unix seconds."""


class RunStarted(Event, kw_only=True, tag="run_started"):
    """The run exists and its ranks are about to be launched."""

    run: str
    """Run id."""
    recipe: str
    """Name of the recipe."""
    world_size: WorldSize
    run_dir: str


class World(Event, kw_only=True, tag="world"):
    """The run has ranks 0 to ``world_size`` - 1 from here on: a new attempt has others, or a rank has started more.

    It is written before the first event of a rank that the plan does not have.
    """

    world_size: WorldSize
    attempt: Count = 0
    """The first attempt with these ranks, from 1; 0: all have them."""


class RankState(Event, kw_only=True, tag="rank_state"):
    """A rank entered a state."""

    rank: Rank
    state: RankStateName
    local_rank: Count | None = None
    node: Rank | None = None
    """Index of the node in the plan."""
    host: str | None = None
    device: str | None = None
    """``cpu`` or ``cuda:<local index> <UUID or name>``."""
    pid: Count | None = None
    threads: Count | None = None
    """Threads on which torch computes on the CPU; absent where they are not known."""
    message: str | None = None
    versions: dict[str, str] | None = None
    """Versions on its host by name, such as ``torch``; of the first rank of a host when it is spawned."""


class Joining(Event, kw_only=True, tag="joining"):
    """Ranks that have joined the process group and ranks that are missing; written by rank 0."""

    joined: list[Rank]
    missing: list[Rank]
    waited_ms: FiniteFloat


class Unheard(Event, kw_only=True, tag="unheard"):
    """One rank of each host gets no heartbeats from other hosts; written at the start, and when these change."""

    rank: Rank
    ranks: list[Rank]
    """All ranks of the other hosts whose heartbeats have stopped; empty: those of all hosts come."""


class TrainingPlan(Event, kw_only=True, tag="training_plan"):
    """Size of the training, known once the data is loaded; written by rank 0 before the first step."""

    world_size: WorldSize
    updates_per_epoch: Count
    """Optimizer steps in the first epoch; others may have other numbers, by ``update_freq``."""
    samples_per_epoch: Count
    """Over all ranks."""
    max_updates: Count = 0
    """Optimizer steps after which the training stops; 0: no limit."""
    max_epochs: Count = 0
    """0: no limit."""
    first_update: Count = 0
    """Optimizer steps done before this start, when it resumes."""
    last_update: Count = 0
    """Optimizer steps done after ``max_epochs``; 0: not known."""
    parameters: Count | None = None
    """Trainable parameters of the model."""
    loss_unit: str = ""
    """Unit of the task's loss, such as ``nats``; empty: none is known."""
    best_metric: str = "loss"
    """Metric of the validations by which the best one is chosen."""
    best_is_highest: bool = False
    """Whether a higher value of it is better."""
    best_value: FiniteFloat | None = None
    """That of the best validation before this start, when it resumes; absent without one."""
    best_step: Count = 0
    """Its step."""
    tf32: bool | None = None
    """Whether a GPU rounds products of 32-bit floats to TF32; absent on CPUs."""


class ShareChange(Event, kw_only=True, tag="shares"):
    """The ranks divide the global batch in another way from a step on; written by rank 0. Times are of one micro-step.

    With ``max_tokens`` shares are tokens, and so are bounds and the sample of a time. It is written again, with
    ``measured_ms``, once the new shares were measured.
    """

    step: StepNumber
    """The first step with the new shares."""
    previous: list[Count]
    """Samples per micro-step of each rank before; empty at the start."""
    shares: list[Count]
    """Samples per micro-step of each rank from this step on; their sum stays."""
    cause: Literal["start", "learned", "measured", "memory", "resumed", "recorded"]
    """``start``: equal shares; ``learned``: those of a start, by speeds of earlier runs; ``measured``: by the times
    below; ``memory``: a rank ran out of memory; ``resumed``: by the checkpoint; ``recorded``: by another run."""
    fixed_ms: list[FiniteFloat] | None = None
    """Compute of each rank that does not depend on its share; absent where nothing was measured."""
    per_sample_ms: list[FiniteFloat] | None = None
    """Compute of each rank per sample, likewise."""
    bounds: list[Count] | None = None
    """Most samples that the memory of each rank holds, 0 if not known; absent while no rank ran out of memory."""
    slowest_ms: FiniteFloat | None = None
    """Compute of the slowest rank with the shares before."""
    expected_ms: FiniteFloat | None = None
    """Compute of the slowest rank with the new shares, as expected."""
    measured_ms: FiniteFloat | None = None
    """Compute of the slowest rank with the new shares, as measured."""


class ModelFlops(Event, kw_only=True, tag="model_flops"):
    """Floating-point operations of the model per sample, counted by each rank on its first batches."""

    rank: Rank
    flops_per_sample: FiniteFloat
    """Operations of forward and backward pass, without the recomputation of activation checkpointing."""
    number_format: Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
    """Number format of most of these operations."""
    device_name: str | None = None
    """Name of the rank's GPU; absent on a CPU."""
    peak_flops_per_s: FiniteFloat | None = None
    """Operations per second of that GPU, each at the peak of its number format; absent if a peak is not known."""
    varies: bool = False
    """Whether the operations per sample vary, so that ``flops_per_sample`` holds for the counted batches only."""


class Step(Event, kw_only=True, tag="step"):
    """One optimizer step of one rank, or several when steps are faster than about 20 a second.

    Durations and losses are means over the covered steps; ``samples`` and ``tokens`` are totals.
    """

    rank: Rank
    step: StepNumber
    """Optimizer steps done, from 1; the last one when several are covered."""
    epoch: Count
    """From 1."""
    steps: StepsCovered
    """Number of optimizer steps that this event covers."""
    samples: Count | None = None
    """Samples that this rank read in the covered steps; absent where not known."""
    loss: FiniteFloat | None = None
    """This rank's mean loss."""
    non_finite: list[str] = []
    """Numbers of a covered step that were measured and were NaN or infinite: ``loss``, ``grad_norm``. Their own fields
    are absent then, as are those of numbers that were not measured."""
    tokens: Count | None = None
    lr: FiniteFloat | None = None
    """Learning rate of the options; where no parameter group has it, that of the first group."""
    grad_norm: FiniteFloat | None = None
    """Global norm of the gradient after the reduction, before clipping."""
    local_grad_norm: FiniteFloat | None = None
    """Norm of this rank's own gradient, before the reduction."""
    clock_set_ms: FiniteFloat | None = None
    """By how much this host's clock was set since the rank's start, forward if positive: ``time`` without it is by the
    time since the boot. Absent where it was not set by a second."""
    step_ms: FiniteFloat | None = None
    """From the end of the previous step to the end of this one."""
    data_ms: FiniteFloat | None = None
    """Waiting for the data loader."""
    h2d_ms: FiniteFloat | None = None
    """Copying the batch to the device."""
    forward_ms: FiniteFloat | None = None
    backward_ms: FiniteFloat | None = None
    """Backward computation until the last bucket was ready, without the exposed synchronisation."""
    optimizer_ms: FiniteFloat | None = None
    """Clipping and the optimizer's step."""
    other_ms: FiniteFloat | None = None
    """The rest of the step, outside of all other phases: the training's own code between optimizer and data."""
    gc_ms: FiniteFloat | None = None
    """Time in Python's garbage collector during the step; absent if it compiled."""
    compile_ms: FiniteFloat | None = None
    """Time in torch.compile during the covered steps together, which is in no other duration; absent without it."""
    core_wait_ms: dict[str, FiniteFloat] | None = None
    """Time per phase (``data``, ``forward``, …, ``sync`` for the exposed synchronisation) in which this rank's thread
    was runnable and had no core. Phases without such time are left out; None if the kernel does not count it."""
    sync_ms: FiniteFloat | None = None
    """From the launch of the first bucket until all are reduced."""
    sync_exposed_ms: FiniteFloat | None = None
    """From the moment the last bucket is ready until all are reduced: the time that this rank waited."""
    sync_bytes: Count | None = None
    """Bytes reduced in one step."""
    sync_buckets: Count | None = None
    bucket_ms: list[FiniteFloat] | None = None
    """Time of each bucket from ready to reduced, in launch order."""
    groups: list[GroupSync] | None = None
    """Collectives of each process group, without those of DDP's buckets; their exposed parts are in
    ``sync_exposed_ms``, and in no phase."""
    calls: list[CollectiveCall] | None = None
    """Single calls of these, in order, of the last covered detailed step; absent without one."""
    evaluation_ms: FiniteFloat | None = None
    """This rank's time in a script's evaluation before the step or within it, without its waits in collectives."""
    memory_peak_bytes: Count | None = None
    """Peak memory of tensors on the GPU so far."""
    samples_each: list[Count | None] | None = None
    """Those of each covered step, in step order, where they differ; null where unknown: ``samples`` has the others."""
    losses: list[FiniteFloat | None] | None = None
    """The loss of each covered step, in step order; absent if the event covers one step."""
    step_ms_each: list[FiniteFloat | None] | None = None
    """The ``step_ms`` of each covered step, likewise."""
    sync_exposed_ms_each: list[FiniteFloat | None] | None = None
    """The ``sync_exposed_ms`` of each covered step, likewise."""


MAX_METRICS = 256
"""Most names of a user's own metrics that a rank records."""
MAX_METRIC_CHARS = 128
MetricName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_METRIC_CHARS)]


class Metrics(Event, kw_only=True, tag="metrics"):
    """Numbers that the training itself reports by name, at a step; of each name the last one at that step."""

    rank: Rank
    step: Count
    """Optimizer steps done; 0 before the first."""
    values: Annotated[dict[MetricName, FiniteFloat], msgspec.Meta(max_length=MAX_METRICS)] = {}
    non_finite: list[MetricName] = []
    """Names of those that were NaN or infinite."""


SINGLE_VALUES = {"loss": "losses", "step_ms": "step_ms_each", "sync_exposed_ms": "sync_exposed_ms_each"}
"""Field with a mean over the covered steps → field with the value of each step."""


class CollectiveGroup(Event, kw_only=True, tag="collective_group"):
    """A process group of a rank, written before the first step that has a collective of it."""

    rank: Rank
    name: str
    """Of the mesh dimension where there is one, such as ``tp``; ``world`` for all ranks; else ``group 2``. Unique among
    the groups of a rank. Groups of different ranks are the same if name and ranks are equal."""
    ranks: list[Rank]
    """Ascending; empty for ``OTHER_GROUPS``."""
    backend: str = ""


class Doing(Event, kw_only=True, tag="doing"):
    """Phase of a rank in a step that takes unusually long; written once per such wait, while it lasts.

    Outside of steps it is written before a rank waits for all others, as at the end of a validation.
    """

    rank: Rank
    step: StepNumber
    """The step in progress, from 1."""
    part: Literal[
        "data", "h2d", "batch", "loss", "forward", "backward", "sync", "gradients", "optimizer", "other", "group",
        "compile", "threads",
    ]  # fmt: skip
    """``sync``: it waits for other ranks in a collective, as for their gradients. ``group``: likewise
    outside of steps. ``compile``: torch.compile is at work. ``threads``: the script's code has ended, and its threads
    keep the process. In a script's own loop, code between two phases: ``batch``
    from a batch to its forward pass, ``loss`` from a batch to its backward pass, ``gradients`` from the backward pass
    to the optimizer's step."""
    parts_done: Count
    """Completed phases of the step, counted in every micro-step."""
    waited_ms: FiniteFloat
    """Time in this phase so far."""
    collectives: str = ""
    """Description of the rank's last collectives; empty if torch has recorded none."""
    waits_in: str = ""
    """Collective that it is blocked in, and its ``CollectiveGroup``, such as ``all_reduce of tp``."""
    line: str = ""
    """Innermost line of the user's code that the training thread is in, such as ``train.py:12 in augment``."""


class Validation(Event, kw_only=True, tag="validation"):
    """One evaluation, exact over all ranks."""

    step: Count
    epoch: Count
    split: Literal["valid", "test"]
    loss: Result
    """Mean over every example of the split, in the unit of the task; NaN (null in JSON) if it is not finite."""
    metrics: dict[str, Result] = {}
    """By name; NaN (null in JSON) for one that is not finite."""
    weights_step: Count | None = None
    """Optimizer steps after which the tested weights were saved: fewer than ``step`` for the best ones."""

    def __post_init__(self) -> None:
        """Turn null into NaN."""
        self.loss = or_nan(self.loss)
        self.metrics = {name: or_nan(value) for name, value in self.metrics.items()}


class Checkpoint(Event, kw_only=True, tag="checkpoint"):
    """A checkpoint is complete on disk."""

    step: Count
    path: str
    bytes: Count
    write_ms: FiniteFloat
    best: bool = False
    """Whether it is the best so far, and was also written as ``best.pt`` of its folder."""
    run: str = ""
    """Id of the run that the file belongs to; empty where it belongs to none."""


class NoiseScale(Event, kw_only=True, tag="noise_scale"):
    """Gradient noise scale: the batch beyond which more samples hardly make a step better; written by rank 0."""

    step: StepNumber
    batch: Count
    """Samples of the step, over all ranks."""
    gradient_sq: FiniteFloat
    """Squared norm of the true gradient, estimated from this step alone; it may be below 0."""
    noise_sq: FiniteFloat
    """Mean squared distance of a sample's gradient from it, likewise."""
    samples: FiniteFloat | None = None
    """The noise scale: ``noise_sq`` over ``gradient_sq``, each smoothed over the measurements so far; absent while
    these are too few."""


class Checksum(Event, kw_only=True, tag="checksum"):
    """Checksum of a rank's parameters and buffers; equal on all ranks of a healthy run."""

    rank: Rank
    step: Count
    parameters: str
    """Empty where they are divided among the ranks."""
    buffers: str
    non_finite: bool = False
    """Whether a parameter is NaN or infinite."""


class Sample(Event, kw_only=True, tag="sample"):
    """Sample of the model's output as text, written by rank 0."""

    step: Count
    text: str


class Finding(Event, kw_only=True, tag="finding"):
    """A diagnosis with its evidence, raised or cleared."""

    kind: str
    state: Literal["raised", "cleared"] = "raised"
    severity: Literal["info", "warning", "critical"] = "warning"
    rank: Rank | None = None
    host: str | None = None
    device: str | None = None
    step: Count | None = None
    ranks: list[Rank] = []
    """All ranks that it is about, ascending, where these are several; ``rank`` is one of them."""
    cause: str | None = None
    line: str = ""
    """Innermost line of the user's code in which a stalled rank is, such as ``train.py:12 in augment``."""
    message: str = ""
    evidence: dict[str, Result] = {}
    advice: str = ""
    diagnosed: bool = False
    """Whether it comes from the comparison of the record, which also clears it, not from a rank."""

    def __post_init__(self) -> None:
        """Leave out evidence that is not finite, which says nothing, and must not hide the finding."""
        self.evidence = {name: number for name, number in self.evidence.items() if isfinite(or_nan(number))}


class Failure(Event, kw_only=True, tag="failure"):
    """Failure of a rank, a node or the run."""

    kind: str
    """``exception``, ``out_of_memory``, ``signal``, ``exit``, ``join_timeout``, ``non_finite``, ``lost_peer``,
    ``request``, ``launch``, ``training``, ``checkpoint_lost``, ``node_lost``, ``network``; for a rank that others have
    lost: ``stalled``, ``left_early``, ``silent``."""
    message: str
    """One line."""
    rank: Rank | None = None
    host: str | None = None
    step: Count | None = None
    """Of a rank the last step that it had done; where a number is not finite or memory ran out, that step."""
    in_step: Count | None = None
    """The step that it was making, which is not done; None where it failed outside of one, or this is not known."""
    traceback: str | None = None


class Lost(Event, kw_only=True, tag="lost"):
    """Events that could not be written, because the disk was full or stalled."""

    rank: Rank | None = None
    events: Count
    message: str


class Queued(Event, kw_only=True, tag="queued"):
    """The run waits for a scheduler; recorded again when the reason or the expected start changes."""

    job: Count
    partition: str = ""
    reason: str = ""
    """Reason that the scheduler gives: ``Resources``, ``Priority``, …"""
    expected_start: UnixSeconds | None = None


class RunEnded(Event, kw_only=True, tag="run_ended"):
    """The last event of a run."""

    status: Literal["finished", "failed", "stopped"]
    exit_code: ExitStatus
    message: str | None = None
    elapsed_ms: FiniteFloat | None = None
    """From the start of the run to its end by a monotonic clock, waits in a queue included."""
