"""The event schema: what a line of the record may say.

A value that was not measured is absent, never 0; durations are milliseconds, sizes bytes, losses nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

STATES = ("spawned", "joining", "ready", "training", "validating", "saving", "finished", "failed")
"""The states of a rank, in the order in which a healthy run passes through them."""

RankStateName = Literal["spawned", "joining", "ready", "training", "validating", "saving", "finished", "failed"]
RunStatusName = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False, tag_field="type", tag="event"):
    """What every line of the record has. A value that was not measured is absent, never 0."""

    time: float
    """Unix seconds."""


class RunStarted(Event, kw_only=True, tag="run_started"):
    """The run exists and its ranks are about to be launched."""

    run: str
    """Run id."""
    recipe: str
    """Name of the recipe."""
    world_size: int
    run_dir: str


class RankState(Event, kw_only=True, tag="rank_state"):
    """A rank entered a state."""

    rank: int
    state: RankStateName
    local_rank: int | None = None
    node: int | None = None
    """Index of the node in the plan."""
    host: str | None = None
    device: str | None = None
    """``cpu`` or ``cuda:<local index> <UUID or name>``."""
    pid: int | None = None
    message: str | None = None


class Joining(Event, kw_only=True, tag="joining"):
    """Who has reached the process group while others are awaited; written by rank 0."""

    joined: list[int]
    missing: list[int]
    waited_ms: float


class TrainingPlan(Event, kw_only=True, tag="training_plan"):
    """How much there is to do, once the data is known; written by rank 0 before the first step."""

    world_size: int
    updates_per_epoch: int
    """Optimizer steps in one epoch."""
    samples_per_epoch: int
    """Over all ranks."""
    max_updates: int = 0
    """Optimizer steps after which the training stops; 0: no limit."""
    max_epochs: int = 0
    """0: no limit."""
    first_update: int = 0
    """Optimizer steps done before this start, when it resumes."""
    parameters: int | None = None
    """Trainable numbers of the model."""


class Step(Event, kw_only=True, tag="step"):
    """One optimizer step of one rank, or several when steps are faster than about 20 a second.

    Durations and losses are means over the covered steps; ``samples`` and ``tokens`` are totals.
    """

    rank: int
    step: int
    """Optimizer steps done, from 1; the last one when several are covered."""
    epoch: int
    """From 1."""
    steps: int
    """How many optimizer steps this event covers."""
    samples: int
    """Samples that this rank read in the covered steps."""
    loss: float | None = None
    """This rank's mean loss, in nats."""
    tokens: int | None = None
    lr: float | None = None
    grad_norm: float | None = None
    """Global norm of the gradient after the reduction, before clipping."""
    local_grad_norm: float | None = None
    """Norm of this rank's own gradient, before the reduction."""
    step_ms: float | None = None
    """From the end of the previous step to the end of this one."""
    data_ms: float | None = None
    """Waiting for the data loader."""
    h2d_ms: float | None = None
    """Copying the batch to the device."""
    forward_ms: float | None = None
    backward_ms: float | None = None
    """Backward computation until the last bucket was ready, without the exposed synchronisation."""
    optimizer_ms: float | None = None
    """Clipping and the optimizer's step."""
    gc_ms: float | None = None
    """Time in Python's garbage collector within the step."""
    core_wait_ms: dict[str, float] | None = None
    """Of each phase (``data``, ``forward``, …, ``sync`` for the exposed synchronisation), the time in which this
    rank's thread was ready to run and had no core. A phase without is left out; None where nobody counts it."""
    sync_ms: float | None = None
    """First bucket launched to all reduced."""
    sync_exposed_ms: float | None = None
    """Last bucket ready to all reduced: what this rank waited."""
    sync_bytes: int | None = None
    """Bytes reduced in one step."""
    sync_buckets: int | None = None
    bucket_ms: list[float] | None = None
    """Time of each bucket from ready to reduced, in launch order."""
    losses: list[float | None] | None = None
    """The loss of each covered step, in step order; absent where the event covers one."""
    step_ms_each: list[float | None] | None = None
    """Likewise of ``step_ms``."""
    sync_exposed_ms_each: list[float | None] | None = None
    """Likewise of ``sync_exposed_ms``."""


def single_steps(event: Step) -> list[Step]:
    """Return one event per step that ``event`` covers, with its single values; ``event`` alone where it has none.

    What the record keeps as a mean only is absent from them, and samples are shared out evenly.
    """
    lengths_ms = event.step_ms_each
    if lengths_ms is None or len(lengths_ms) != event.steps:
        return [event]
    losses = _each(event.losses, event.steps)
    exposed_ms = _each(event.sync_exposed_ms_each, event.steps)
    first = event.step - event.steps + 1
    ends = [event.time] * event.steps
    for index in range(event.steps - 1, 0, -1):
        ends[index - 1] = ends[index] - (lengths_ms[index] or 0.0) / 1e3
    samples = event.samples
    return [
        Step(
            time=time,
            rank=event.rank,
            step=first + index,
            epoch=event.epoch,
            steps=1,
            samples=samples * (index + 1) // event.steps - samples * index // event.steps,
            lr=event.lr,
            loss=loss,
            step_ms=step_ms,
            sync_exposed_ms=waited_ms,
        )
        for index, (time, loss, step_ms, waited_ms) in enumerate(zip(ends, losses, lengths_ms, exposed_ms, strict=True))
    ]


def _each(values: list[float | None] | None, count: int) -> list[float | None]:
    return values if values is not None and len(values) == count else [None] * count


class Doing(Event, kw_only=True, tag="doing"):
    """What a rank is at in a step that takes unusually long; written once per such wait, while it lasts.

    Outside of steps it is written before a rank waits for all others, as at the end of a validation.
    """

    rank: int
    step: int
    """The step that is under way, from 1."""
    part: Literal["data", "h2d", "forward", "backward", "sync", "optimizer", "other", "group"]
    """``sync``: its own gradients are ready, and it waits for the others'. ``group``: it waits for them outside of
    steps."""
    parts_done: int
    """Parts of the step that are behind it; with several micro-steps they count one by one."""
    waited_ms: float
    """How long it has been at it."""


class Validation(Event, kw_only=True, tag="validation"):
    """One evaluation, exact over all ranks."""

    step: int
    epoch: int
    split: Literal["valid", "test"]
    loss: float
    """Mean over every example of the split, in nats."""
    metrics: dict[str, float] = {}


class Checkpoint(Event, kw_only=True, tag="checkpoint"):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    bytes: int
    write_ms: float


class Checksum(Event, kw_only=True, tag="checksum"):
    """A fingerprint of a rank's parameters and buffers; equal on all ranks of a healthy run."""

    rank: int
    step: int
    parameters: str
    buffers: str


class Sample(Event, kw_only=True, tag="sample"):
    """A piece of the model's output that a person can read, written by rank 0."""

    step: int
    text: str


class NodeSample(Event, kw_only=True, tag="node_sample"):
    """The machine as one process per node sees it, at most once a second."""

    node: int
    host: str
    cpu_percent: float | None = None
    """Use of all cores together, 0 to 100."""
    steal_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ranks: list[RankSample] = []
    gpus: list[GpuSample] = []


class RankSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rank's process on its machine."""

    rank: int
    cpu_percent: float | None = None
    """Of one core: 200 means two cores busy."""
    rss_bytes: int | None = None
    wait_percent: float | None = None
    """Share of wall time runnable but not running (waiting for a core), 0 to 100."""
    sleeps_in: str | None = None
    """Function of the kernel in which its main thread was asleep when its process did next to nothing."""


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU of a node."""

    index: int
    uuid: str
    rank: int | None = None
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: list[str] = []


class Finding(Event, kw_only=True, tag="finding"):
    """A diagnosis with its evidence, raised or cleared."""

    kind: str
    state: Literal["raised", "cleared"] = "raised"
    severity: Literal["info", "warning", "critical"] = "warning"
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    step: int | None = None
    cause: str | None = None
    message: str = ""
    evidence: dict[str, float] = {}
    advice: str = ""


class Failure(Event, kw_only=True, tag="failure"):
    """Why a rank, a node or the run failed."""

    kind: str
    """``exception``, ``out_of_memory``, ``signal``, ``exit``, ``join_timeout``, ``non_finite``, ``lost_peer``,
    ``request``, ``launch``, ``training``, ``checkpoint_lost``; of a rank that others have lost: ``stalled``,
    ``left_early``, ``silent``."""
    message: str
    """One line."""
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    traceback: str | None = None


class Lost(Event, kw_only=True, tag="lost"):
    """Events that could not be written, because the disk was full or stalled."""

    rank: int | None = None
    events: int
    message: str


class RunEnded(Event, kw_only=True, tag="run_ended"):
    """The last event of a run."""

    status: Literal["finished", "failed", "stopped"]
    exit_code: int
    message: str | None = None


AnyEvent = (
    RunStarted
    | RankState
    | Joining
    | TrainingPlan
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


def encode_event(event: Event) -> bytes:
    """Return the event as one JSON line with its newline. Non-finite numbers become null."""
    try:
        return _encode.encode(event) + b"\n"
    except UnicodeEncodeError:  # Such as a message with a file name that is not UTF-8.
        return _encode.encode(_encodable(msgspec.to_builtins(event))) + b"\n"


def _encodable(value: Any) -> Any:
    """Replace what has no UTF-8 form by question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def decode_events(lines: bytes) -> Iterator[AnyEvent]:
    """Yield the events of complete lines; a line that is torn, foreign or of an unknown type is passed over."""
    try:
        yield from _decode.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        for line in lines.splitlines():
            try:
                yield _decode.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
