"""Define the event schema.

A value that was not measured is absent, never 0; durations are milliseconds, sizes bytes, losses nats. Numbers have
bounds, checked on reading: one number beyond them, from a damaged line, could exhaust a reader's memory or overflow.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

STATES = ("spawned", "joining", "ready", "training", "validating", "saving", "finished", "failed")
"""The states of a rank, in the order in which a healthy run passes through them."""

RankStateName = Literal["spawned", "joining", "ready", "training", "validating", "saving", "finished", "failed"]
RunStatusName = Literal["queued", "starting", "running", "stopping", "finished", "failed", "stopped"]

MAX_RANKS = 1 << 16
"""Maximum ranks of a run: 64 of the largest machines of a recipe, whose state still fits in memory."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
"""Number of a rank, or of a node: each has a rank."""
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A whole number that a double holds exactly."""
StepNumber = Annotated[int, Meta(ge=1, le=1 << 53)]
"""Optimizer steps done, from 1."""
StepsCovered = Annotated[int, Meta(ge=1, le=1 << 24)]
"""Steps that one event covers: the widest block of the fastest steps has 8 million."""
FiniteFloat = Annotated[float, Meta(ge=-1e100, le=1e100)]
"""A measured or computed number; bounds far beyond single precision, within which sums stay finite."""
UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
"""Unix time until the year 5138, which every calendar function accepts."""
ExitStatus = Annotated[int, Meta(ge=-255, le=255)]
"""An exit code, or a signal's number negated."""


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
    message: str | None = None


class Joining(Event, kw_only=True, tag="joining"):
    """Ranks that have joined the process group and ranks that are missing; written by rank 0."""

    joined: list[Rank]
    missing: list[Rank]
    waited_ms: FiniteFloat


class TrainingPlan(Event, kw_only=True, tag="training_plan"):
    """Size of the training, known once the data is loaded; written by rank 0 before the first step."""

    world_size: WorldSize
    updates_per_epoch: Count
    """Optimizer steps in one epoch."""
    samples_per_epoch: Count
    """Over all ranks."""
    max_updates: Count = 0
    """Optimizer steps after which the training stops; 0: no limit."""
    max_epochs: Count = 0
    """0: no limit."""
    first_update: Count = 0
    """Optimizer steps done before this start, when it resumes."""
    parameters: Count | None = None
    """Trainable parameters of the model."""
    tf32: bool | None = None
    """Whether a GPU rounds products of 32-bit floats to TF32; absent on CPUs."""


class ModelFlops(Event, kw_only=True, tag="model_flops"):
    """Floating-point operations that the model makes for a sample, counted by each rank on its first batches."""

    rank: Rank | None = None
    """None in older records, where rank 0 alone counted."""
    flops_per_sample: FiniteFloat
    """Of forward and backward pass, without what activation checkpointing computes again."""
    number_format: Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
    """In which most of them are made."""
    device_name: str | None = None
    """Name of the rank's GPU; absent on a CPU."""
    peak_flops_per_s: FiniteFloat | None = None
    """Operations per second of that GPU if it makes each at the peak of its number format; absent where one is not
    known."""
    varies: bool = False
    """Whether samples take unequally many, so that the earlier figure is of those counted and of no others."""


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
    """How many optimizer steps this event covers."""
    samples: Count
    """Samples that this rank read in the covered steps."""
    loss: FiniteFloat | None = None
    """This rank's mean loss, in nats."""
    tokens: Count | None = None
    lr: FiniteFloat | None = None
    grad_norm: FiniteFloat | None = None
    """Global norm of the gradient after the reduction, before clipping."""
    local_grad_norm: FiniteFloat | None = None
    """Norm of this rank's own gradient, before the reduction."""
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
    gc_ms: FiniteFloat | None = None
    """Time in Python's garbage collector during the step."""
    core_wait_ms: dict[str, FiniteFloat] | None = None
    """Of each phase (``data``, ``forward``, …, ``sync`` for the exposed synchronisation), the time in which this
    rank's thread was ready to run and had no core. Phases without such time are left out; None where the kernel does
    not count it."""
    sync_ms: FiniteFloat | None = None
    """First bucket launched to all reduced."""
    sync_exposed_ms: FiniteFloat | None = None
    """Last bucket ready to all reduced: how long this rank waited."""
    sync_bytes: Count | None = None
    """Bytes reduced in one step."""
    sync_buckets: Count | None = None
    bucket_ms: list[FiniteFloat] | None = None
    """Time of each bucket from ready to reduced, in launch order."""
    memory_peak_bytes: Count | None = None
    """Most memory of the GPU that tensors have held at a time so far."""
    losses: list[FiniteFloat | None] | None = None
    """The loss of each covered step, in step order; absent where the event covers one."""
    step_ms_each: list[FiniteFloat | None] | None = None
    """Likewise of ``step_ms``."""
    sync_exposed_ms_each: list[FiniteFloat | None] | None = None
    """Likewise of ``sync_exposed_ms``."""


SINGLE_VALUES = {"loss": "losses", "step_ms": "step_ms_each", "sync_exposed_ms": "sync_exposed_ms_each"}
"""Fields of which an event that covers several steps has each step's own value, and the fields with those."""
MEAN_FIELDS = tuple(
    name for name in Step.__struct_fields__
    if name not in (
        *SINGLE_VALUES, *SINGLE_VALUES.values(), "time", "rank", "step", "epoch", "steps", "samples", "tokens", "lr",
        "bucket_ms",
    )
)  # fmt: skip
"""Fields that such an event has as a mean, or of its last step."""


def single_steps(event: Step, *, means: bool = False) -> list[Step]:
    """Return one event per covered step, with its single values; ``[event]`` where it has none.

    Samples and tokens are divided evenly. Fields that the record has as a mean only are absent.

    Args:
        event: One or several steps.
        means: Repeat such means in each step instead, also where the event has no single values at all; the times of
            the buckets are then those of the last step.
    """
    count, lengths_ms = event.steps, event.step_ms_each
    if count == 1 or (not means and (lengths_ms is None or len(lengths_ms) != count)):
        return [event]
    each = {name: _each(event, name, means) for name in SINGLE_VALUES}
    repeated = {name: getattr(event, name) for name in MEAN_FIELDS} if means else {}
    ends = [event.time] * count
    for index in range(count - 1, 0, -1):
        ends[index - 1] = ends[index] - (each["step_ms"][index] or 0.0) / 1e3
    singles = [
        Step(
            time=time,
            rank=event.rank,
            step=event.step - count + 1 + index,
            epoch=event.epoch,
            steps=1,
            samples=_part(event.samples, index, count),
            tokens=None if event.tokens is None else _part(event.tokens, index, count),
            lr=event.lr,
            loss=loss,
            step_ms=step_ms,
            sync_exposed_ms=waited_ms,
            **repeated,
        )
        for index, (time, loss, step_ms, waited_ms) in enumerate(zip(ends, *each.values(), strict=True))
    ]
    if means:
        singles[-1].bucket_ms = event.bucket_ms
    return singles


def _each(event: Step, name: str, means: bool) -> list[float | None]:
    values = getattr(event, SINGLE_VALUES[name])
    if values is not None and len(values) == event.steps:
        return list(values)
    return [getattr(event, name) if means else None] * event.steps


def _part(total: int, index: int, count: int) -> int:
    return total * (index + 1) // count - total * index // count


class Doing(Event, kw_only=True, tag="doing"):
    """Phase of a rank in a step that takes unusually long; written once per such wait, while it lasts.

    Outside of steps it is written before a rank waits for all others, as at the end of a validation.
    """

    rank: Rank
    step: StepNumber
    """The step in progress, from 1."""
    part: Literal["data", "h2d", "forward", "backward", "sync", "optimizer", "other", "group"]
    """``sync``: its own gradients are ready, and it waits for the others'. ``group``: it waits for them outside of
    steps."""
    parts_done: Count
    """Phases of the step that are complete; with several micro-steps each counts."""
    waited_ms: FiniteFloat
    """Time in this phase so far."""
    collectives: str = ""
    """The rank's last collectives in words; empty where torch has recorded none."""


class Validation(Event, kw_only=True, tag="validation"):
    """One evaluation, exact over all ranks."""

    step: Count
    epoch: Count
    split: Literal["valid", "test"]
    loss: FiniteFloat
    """Mean over every example of the split, in nats."""
    metrics: dict[str, FiniteFloat] = {}
    weights_step: Count | None = None
    """Optimizer steps of the weights that a test evaluated: of the best ones fewer than ``step``."""


class Checkpoint(Event, kw_only=True, tag="checkpoint"):
    """A checkpoint is complete on disk."""

    step: Count
    path: str
    bytes: Count
    write_ms: FiniteFloat
    best: bool = False
    """Whether it is the best so far, and ``best.pt`` of its folder as well."""


class Checksum(Event, kw_only=True, tag="checksum"):
    """Checksum of a rank's parameters and buffers; equal on all ranks of a healthy run."""

    rank: Rank
    step: Count
    parameters: str
    buffers: str


class Sample(Event, kw_only=True, tag="sample"):
    """Sample of the model's output as text, written by rank 0."""

    step: Count
    text: str


class NodeSample(Event, kw_only=True, tag="node_sample"):
    """Sample of a machine by its node agent, at most once a second."""

    node: Rank
    host: str
    cpu_percent: FiniteFloat | None = None
    """Use of all cores together, 0 to 100."""
    steal_percent: FiniteFloat | None = None
    cores: Count | None = None
    """Logical cores that the node's processes may use: CPU affinity and the container's quota."""
    other_cpu_percent: FiniteFloat | None = None
    """Of one core, by processes that are no rank, as workers of the data loaders are; absent where the node may not
    use all cores of the machine."""
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    """Of the machine, or what the container may use of it."""
    ranks: list[RankSample] = []
    gpus: list[GpuSample] = []


class RankSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sample of a rank's process."""

    rank: Rank
    cpu_percent: FiniteFloat | None = None
    """Of one core: 200 means two cores busy."""
    rss_bytes: Count | None = None
    wait_percent: FiniteFloat | None = None
    """Share of wall time runnable but not running (waiting for a core), 0 to 100."""
    busy_threads: FiniteFloat | None = None
    """Its threads that run or wait for a core, on average; counted where the main thread waits a tenth of the time."""
    held: str | None = None
    """``T`` where it is stopped by a signal, ``t`` where a debugger holds it."""
    log_bytes: Count | None = None
    """Size of its log, by which the lines of the log can be dated."""
    sleeps_in: str | None = None
    """Function of the kernel in which its main thread was asleep when its process did next to nothing."""


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sample of a GPU."""

    index: Count
    uuid: str
    rank: Rank | None = None
    utilization_percent: FiniteFloat | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_watts: FiniteFloat | None = None
    temperature_celsius: FiniteFloat | None = None
    sm_clock_mhz: Count | None = None
    max_sm_clock_mhz: Count | None = None
    throttle_reasons: list[str] = []


class Finding(Event, kw_only=True, tag="finding"):
    """A diagnosis with its evidence, raised or cleared."""

    kind: str
    state: Literal["raised", "cleared"] = "raised"
    severity: Literal["info", "warning", "critical"] = "warning"
    rank: Rank | None = None
    host: str | None = None
    device: str | None = None
    step: Count | None = None
    cause: str | None = None
    message: str = ""
    evidence: dict[str, FiniteFloat] = {}
    advice: str = ""


class Failure(Event, kw_only=True, tag="failure"):
    """Failure of a rank, a node or the run."""

    kind: str
    """``exception``, ``out_of_memory``, ``signal``, ``exit``, ``join_timeout``, ``non_finite``, ``lost_peer``,
    ``request``, ``launch``, ``training``, ``checkpoint_lost``, ``node_lost``; of a rank that others have lost:
    ``stalled``, ``left_early``, ``silent``."""
    message: str
    """One line."""
    rank: Rank | None = None
    host: str | None = None
    step: Count | None = None
    traceback: str | None = None


class Lost(Event, kw_only=True, tag="lost"):
    """Events that could not be written, because the disk was full or stalled."""

    rank: Rank | None = None
    events: Count
    message: str


class Queued(Event, kw_only=True, tag="queued"):
    """The run waits for a scheduler; recorded again where the reason or the expectation changes."""

    job: Count
    partition: str = ""
    reason: str = ""
    """The scheduler's word: ``Resources``, ``Priority``, …"""
    expected_start: UnixSeconds | None = None


class RunEnded(Event, kw_only=True, tag="run_ended"):
    """The last event of a run."""

    status: Literal["finished", "failed", "stopped"]
    exit_code: ExitStatus
    message: str | None = None


AnyEvent = (
    RunStarted
    | Queued
    | RankState
    | Joining
    | TrainingPlan
    | ModelFlops
    | Step
    | Doing
    | Validation
    | Checkpoint
    | Checksum
    | Sample
    | NodeSample
    | Finding
    | Failure
    | Lost
    | RunEnded
)

_encode = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(AnyEvent)
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding bytes that are no event; too deep a nesting raises ``RecursionError``."""


def encode_event(event: Event) -> bytes:
    """Return the event as one JSON line with its newline. Non-finite numbers become null."""
    try:
        return _encode.encode(event) + b"\n"
    except UnicodeEncodeError:  # Such as a message with a file name that is not UTF-8.
        return _encode.encode(_encodable(msgspec.to_builtins(event))) + b"\n"


def _encodable(value: Any) -> Any:
    """Replace characters that UTF-8 cannot encode by question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def decode_events(lines: bytes, world_size: int = MAX_RANKS) -> list[AnyEvent]:
    """Return the events of complete lines; skip lines that are torn, of an unknown type or of other ranks."""
    events = decode_lines(_decode, lines)
    if world_size >= MAX_RANKS:  # the bound of the schema itself
        return events
    return [
        event
        for event in events
        if (event.rank < world_size if type(event) is Step else is_within_world(event, world_size))
    ]


def decode_lines(decoder: msgspec.json.Decoder[T], lines: bytes) -> list[T]:
    """Decode lines of JSON; skip those that are torn or of another type."""
    try:
        return decoder.decode_lines(lines)
    except DECODE_ERRORS:
        found: list[T] = []
        for line in lines.splitlines():
            with suppress(*DECODE_ERRORS):
                found.append(decoder.decode(line))
        return found


def is_within_world(event: AnyEvent, world_size: int) -> bool:
    """Return whether all ranks and nodes of an event are below the world size."""
    match event:
        case RunStarted() | TrainingPlan():
            return event.world_size <= world_size
        case Joining():
            return max((*event.joined, *event.missing), default=0) < world_size
        case NodeSample():
            named = [event.node, *(each.rank for each in event.ranks), *(gpu.rank or 0 for gpu in event.gpus)]
            return max(named) < world_size
        case RankState():
            return max(event.rank, event.node or 0) < world_size
    return (getattr(event, "rank", None) or 0) < world_size
