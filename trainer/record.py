"""The record of a run: event schema, event writer and the layout of the run directory.

Torch-free, because the console reads with the same definitions that the ranks write with.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from trainer.digest import Digest

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
    """Of each part (``data``, ``forward``, …, ``sync`` for the exposed synchronisation), the time in which this
    rank's thread was ready to run and had no core. A part without is left out; None where nobody counts it."""
    sync_ms: float | None = None
    """First bucket launched to all reduced."""
    sync_exposed_ms: float | None = None
    """Last bucket ready to all reduced: what this rank waited."""
    sync_bytes: int | None = None
    """Bytes reduced in one step."""
    sync_buckets: int | None = None
    bucket_ms: list[float] | None = None
    """Time of each bucket from ready to reduced, in launch order."""


class Doing(Event, kw_only=True, tag="doing"):
    """What a rank is at in a step that takes unusually long; written once per such wait, while it lasts."""

    rank: int
    step: int
    """The step that is under way, from 1."""
    part: Literal["data", "h2d", "forward", "backward", "sync", "optimizer", "other"]
    """``sync``: its own gradients are ready, and it waits for the others'."""
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
    ``request``, ``launch``."""
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


class RunDir:
    """Names every file of a run directory; creating one is the caller's business."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.toml"
        self.plan = self.path / "plan.json"
        self.status = self.path / "status.json"
        self.events = self.path / "events"
        self.run_events = self.events / "run.ndjson"
        self.digest = self.path / "digest"
        """The events in short, from which a long run is shown at once; an aid that may be missing."""
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.nodes = self.path / "nodes"
        """What each node's parent reports when it ends, ``<node>.json``."""
        self.attempt = self.path / "attempt.json"
        """The processes of the nodes, by which another supervisor recognises them."""
        self.lock = self.path / "supervisor.lock"
        """Locked by the one supervisor."""
        self.tmp = self.path / "tmp"
        """The ranks' temporary folder, deleted when the run ends."""

    def rank_events(self, rank: int) -> Path:
        """Events of one rank."""
        return self.events / f"{rank}.ndjson"

    def node_events(self, node: int) -> Path:
        """Events of a node's parent process: machine samples and how its ranks ended."""
        return self.events / f"node-{node}.ndjson"

    def rank_log(self, rank: int) -> Path:
        """What one rank printed, both streams."""
        return self.logs / f"{rank}.log"

    def node_log(self, node: int) -> Path:
        """What a node's parent process printed."""
        return self.logs / f"node-{node}.log"

    def node_result(self, node: int) -> Path:
        """How a node ended; written atomically before its parent process leaves."""
        return self.nodes / f"{node}.json"


class EventWriter:
    """Appends events to one file without ever making the caller wait for the disk.

    A thread writes what has gathered, at most ten times a second. While the disk is full or stalled the events wait in
    memory; when that is full too, further ones are dropped and counted, and a ``lost`` event marks the gap.
    Without a path every call returns at once.
    """

    interval_s = 0.1
    capacity = 100_000
    """Events held in memory while the disk does not take them."""
    lines_per_write = 1000

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int | None = None,
        now: Callable[[], float] = time.time,
        shared: bool = False,
    ) -> None:
        """Open the file and start the thread; a last line that another process left torn is ended first.

        Args:
            path: Of the file; None to record nothing.
            rank: For the events that the writer makes itself.
            now: Unix seconds.
            shared: Whether other processes append to the file as well. Then no digest is kept, which counts in bytes.

        Raises:
            OSError: the file cannot be opened.
        """
        self._rank = rank
        self._now = now
        self._pending: list[bytes] = []
        """Lines to write; the first may be what is left of a line of which a part is written."""
        self._lost = 0
        self._reason = ""
        """Why the last event was dropped."""
        self._trouble = ""
        """Why the last write failed, empty when it did not."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._before_write: Callable[[bool], None] | None = None
        self._thread: threading.Thread | None = None
        self._digest: Digest | None = None
        """Of a run directory's events; None also once it could not be written."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            size = path.stat().st_size
            if _is_torn(path):
                self._pending.append(b"\n")
                size += 1
            if path.parent.name == "events" and not shared:
                from trainer.digest import Digest  # it is made of the events above

                self._digest = Digest(path.parent.with_name("digest"), path.stem, size)
            self._thread = threading.Thread(target=self._run, args=(fd,), name="event-writer", daemon=True)
            self._thread.start()

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded at all."""
        return self._thread is not None

    @property
    def lost(self) -> int:
        """Events dropped and not yet reported; after ``close`` also those that the disk has not taken."""
        with self._lock:
            return self._lost + (0 if self.enabled else len(self._pending))

    def write(self, event: Event) -> None:
        """Queue one event; never blocks on the disk."""
        if self._thread is None:
            return
        line = encode_event(event)
        with self._lock:
            if len(self._pending) >= self.capacity:
                self._lost += 1
                self._reason = self._trouble or "the disk does not keep up"
            else:
                self._mark_gap()
                self._queue(event, line)

    def _queue(self, event: Event, line: bytes) -> None:
        """Let a line wait for the disk; the caller holds the lock."""
        self._pending.append(line)
        if self._digest is not None:
            self._digest.add(event, len(line))

    def before_each_write(self, call: Callable[[bool], None]) -> None:
        """Have the writing thread call this ten times a second, to make events of what has gathered elsewhere.

        The argument is True at the last time, when the writer closes.
        """
        self._before_write = call

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all that was queued is written, or the time is over; True when nothing is pending."""
        deadline = time.monotonic() + timeout_s
        while self._thread is not None and self._thread.is_alive():
            with self._lock:
                if not self._pending and not self._lost:
                    return True
            self._wake.set()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return not self._pending

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left and end the thread; a stalled disk cannot hold the caller longer than the time-out."""
        if self._thread is None:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._thread = None

    def _mark_gap(self) -> None:
        """Queue the report of what was dropped, at the place where it is missing; the caller holds the lock."""
        if self._lost:
            lost = Lost(time=self._now(), rank=self._rank, events=self._lost, message=self._reason)
            self._queue(lost, encode_event(lost))
            self._lost = 0

    def _run(self, fd: int) -> None:
        while True:
            closing = self._closing
            if self._before_write is not None:
                self._before_write(closing)
            self._drain(fd)
            self._write_digest(closing)
            if closing:
                break
            self._wake.wait(self.interval_s)
            self._wake.clear()
        os.close(fd)

    def _drain(self, fd: int) -> None:
        """Write until nothing is pending or the disk refuses."""
        while True:
            with self._lock:
                if not self._pending:
                    self._mark_gap()
                lines = self._pending[: self.lines_per_write]
            if not lines:
                return
            written = self._append(fd, b"".join(lines))
            done = 0
            while done < len(lines) and written >= len(lines[done]):
                written -= len(lines[done])
                done += 1
            with self._lock:
                del self._pending[:done]
                if written:  # A part of a line; the rest of it comes next.
                    self._pending[0] = self._pending[0][written:]
            if done < len(lines):
                return

    def _write_digest(self, closing: bool) -> None:
        """Write the digest of lines that are written; none any more once the disk refused, and the events are read."""
        with self._lock:
            if self._digest is None or self._pending:
                return
            if closing:
                self._digest.finish()
            digest = self._digest
            parts = digest.take()
        try:
            digest.append(parts)
        except OSError:
            self._digest = None

    def _append(self, fd: int, data: bytes) -> int:
        """Return how many bytes the disk took."""
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, data[written:])
        except OSError as error:
            self._trouble = error.strerror or "the disk refused the write"
        else:
            self._trouble = ""
        return written


def _is_torn(path: Path) -> bool:
    """Return whether a file's last line lacks its end, as after a crash."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
