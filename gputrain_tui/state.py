"""Everything a view shows about a run, folded from its events; no I/O, no clock, bounded memory.

Each rank keeps running totals and a ring of their earlier values, so that a mean over the last events or over the
whole run is one subtraction, and an event costs the same after a week as at the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

from gputrain_tui.fate import fate
from trainer.digest import Block
from trainer.outcome import root_cause
from trainer.record import (
    AnyEvent,
    Checkpoint,
    Checksum,
    Doing,
    Event,
    Failure,
    Finding,
    Joining,
    Lost,
    NodeSample,
    RankState,
    RunEnded,
    RunStarted,
    Sample,
    Step,
    TrainingPlan,
    Validation,
)

WINDOW = 50
"""Step events of a rank that its recent means cover."""
KEPT = 1000
"""Validations, checkpoints and failures kept."""
PACE_MARKS = 60
"""Marks of (time, step), at least a second apart, from which the time left is told."""
MEMORY_SAMPLES = 600
"""Machine samples, one a second, over which a rank's memory is followed for the diagnosis."""
OPEN_STEPS = 64
"""Steps whose synchronisation times are held until every rank has reported them."""


class Totals(NamedTuple):
    """Sums over a rank's step events; the difference of two is a window."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    step_ms: float = 0.0
    """Over steps whose duration was measured."""
    timed_steps: int = 0
    """Steps that ``step_ms`` sums over."""
    timed_samples: int = 0
    """Samples of those steps."""
    parts_ms: float = 0.0
    """Durations of the steps whose parts were measured: what data, compute and optimizer are shares of."""
    data_ms: float = 0.0
    """Waiting for data and copying it to the device."""
    compute_ms: float = 0.0
    """Forward and backward, without the exposed synchronisation."""
    optimizer_ms: float = 0.0
    synced_ms: float = 0.0
    """Durations of the steps whose exposed synchronisation was measured."""
    synced_steps: int = 0
    exposed_ms: float = 0.0
    loss: float = 0.0
    """Sum over steps."""
    loss_steps: int = 0
    sync_ms: float = 0.0
    """From the first bucket launched to all reduced."""
    sync_tail_ms: float = 0.0
    """The exposed part of it, over the same steps."""

    def since(self, earlier: Totals) -> Totals:
        """Return the sums over the events after ``earlier``."""
        return Totals._make(a - b for a, b in zip(self, earlier, strict=True))

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per step, nats."""
        return self.loss / self.loss_steps if self.loss_steps else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of stepping."""
        return 1000 * self.timed_samples / self.step_ms if self.step_ms > 0 else None

    @property
    def mean_step_ms(self) -> float | None:
        """Mean duration of a step, ms."""
        return self.step_ms / self.timed_steps if self.timed_steps else None

    @property
    def mean_exposed_ms(self) -> float | None:
        """Mean wait for the gradient synchronisation per step, ms."""
        return self.exposed_ms / self.synced_steps if self.synced_steps else None

    @property
    def data_share(self) -> float | None:
        """Share of step time spent waiting for data, 0 to 1."""
        return self.data_ms / self.parts_ms if self.parts_ms > 0 else None

    @property
    def compute_share(self) -> float | None:
        """Share of step time in forward and backward, 0 to 1."""
        return self.compute_ms / self.parts_ms if self.parts_ms > 0 else None

    @property
    def optimizer_share(self) -> float | None:
        """Share of step time in clipping and the optimizer, 0 to 1."""
        return self.optimizer_ms / self.parts_ms if self.parts_ms > 0 else None

    @property
    def sync_share(self) -> float | None:
        """Share of step time waiting for the gradient synchronisation, 0 to 1."""
        return self.exposed_ms / self.synced_ms if self.synced_ms > 0 else None


NOTHING = Totals()


class RankView:
    """One rank as it was last heard of."""

    __slots__ = (
        "device",
        "doing",
        "events",
        "failure",
        "fate",
        "first_step_time",
        "gpu",
        "gpu_bytes",
        "host",
        "last",
        "lateness",
        "local_rank",
        "marks",
        "message",
        "node",
        "pid",
        "process",
        "rank",
        "rss_bytes",
        "sampled",
        "started_at",
        "state",
        "steps",
        "time",
        "totals",
    )

    def __init__(self, rank: int, history: int = 0) -> None:
        self.rank = rank
        self.state: str | None = None
        """Last state it entered; None before it was spawned."""
        self.node: int | None = None
        self.host: str | None = None
        self.local_rank: int | None = None
        self.device: str | None = None
        self.pid: int | None = None
        self.message: str | None = None
        self.failure: Failure | None = None
        """Why it failed, as it or its node's parent tells it."""
        self.fate: str | None = None
        """How another rank's failure or the end of the run ended it, as ``fate`` tells it."""
        self.time: float | None = None
        """When it was last heard of, Unix seconds."""
        self.first_step_time: float | None = None
        """Time of its first step event, Unix seconds."""
        self.last: Step | None = None
        """Its newest step event."""
        self.doing: Doing | None = None
        """What it is at, while a step takes unusually long."""
        self.events = 0
        """Step events seen."""
        self.totals = NOTHING
        """Over the whole run."""
        self.marks: deque[Totals] = deque([NOTHING], maxlen=WINDOW + 1)
        """Totals after each of the last events; the first is where the window begins."""
        self.lateness: deque[float] = deque(maxlen=WINDOW)
        """How much later than the first rank it was ready to synchronise, ms, per step that all ranks reported."""
        self.steps: deque[Step] = deque(maxlen=history)
        """Its last step events since it was last started, as many as the run's ``history``."""
        self.started_at = 0
        """Optimizer steps that were done when it was last started."""
        self.sampled: Step | None = None
        """Its newest step event with the time of each bucket."""
        watched = MEMORY_SAMPLES if history else 0
        self.rss_bytes: deque[tuple[float, int]] = deque(maxlen=watched)
        """Its process's memory since its first step, with the time, where the run keeps a history."""
        self.gpu_bytes: deque[tuple[float, int]] = deque(maxlen=watched)
        """Likewise its GPU's."""
        self.process: Any = None
        """Newest ``RankSample`` of its process."""
        self.gpu: Any = None
        """Newest ``GpuSample`` of its device."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.last.step if self.last is not None else 0

    @property
    def standing(self) -> str | None:
        """What it is shown as: its fate, where it has one, else its state; only what failed by itself is ``failed``."""
        return self.fate or self.state

    @property
    def recent(self) -> Totals:
        """Sums over the last events."""
        return self.totals.since(self.marks[0])

    @property
    def memory_bytes(self) -> int | None:
        """Memory used: of its GPU where it has one, of its process otherwise."""
        if self.gpu is not None and self.gpu.memory_used_bytes is not None:
            return int(self.gpu.memory_used_bytes)
        if self.process is not None and self.process.rss_bytes is not None:
            return int(self.process.rss_bytes)
        return None

    @property
    def late_ms(self) -> float | None:
        """Mean lateness over the last steps, ms."""
        return sum(self.lateness) / len(self.lateness) if self.lateness else None


class RunState:
    """A run as its events tell it. ``apply`` changes it; everything else only looks.

    ``version`` moves with every event, so that a view repaints only when there is something new.
    """

    def __init__(self, *, world_size: int = 0, max_updates: int = 0, max_epochs: int = 0, history: int = 0) -> None:
        """Begin with nothing heard.

        Args:
            world_size: ranks that are expected.
            max_updates: optimizer steps after which the training ends, 0: no limit.
            max_epochs: epochs after which it ends, 0: no limit.
            history: step events kept per rank, for the diagnosis; views do without.
        """
        self.version = 0
        self._history = history
        self.run = ""
        """Run id."""
        self.recipe = ""
        self.run_dir = ""
        self.world_size = world_size
        self.max_updates = max_updates
        """0: no limit."""
        self.max_epochs = max_epochs
        """0: no limit."""
        self.plan: TrainingPlan | None = None
        self.started: float | None = None
        """Unix seconds."""
        self.ended: RunEnded | None = None
        self.time = 0.0
        """Newest time of any event, Unix seconds."""
        self.ranks: dict[int, RankView] = {rank: RankView(rank, history) for rank in range(world_size)}
        self.joining: Joining | None = None
        """Newest report of who has joined; None once training began."""
        self.validations: deque[Validation] = deque(maxlen=KEPT)
        self.checkpoints: deque[Checkpoint] = deque(maxlen=KEPT)
        self.failures: deque[Failure] = deque(maxlen=KEPT)
        self.root_cause: Failure | None = None
        """What the supervisor, or else the earliest failure that is no consequence, says."""
        self.findings: dict[tuple[str, int | None], Finding] = {}
        """Raised and not cleared, by kind and rank."""
        self.past_findings: deque[Finding] = deque(maxlen=KEPT)
        """Every finding as it was raised or cleared."""
        self.checksums: dict[int, Checksum] = {}
        """Newest per rank."""
        self.nodes: dict[int, NodeSample] = {}
        """Newest machine sample per node."""
        self.sample: Sample | None = None
        self.lost = 0
        """Events that the disk did not take."""
        self._open_steps: dict[int, dict[int, float]] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_MARKS)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            RankState: self._rank_state,
            Joining: self._joining,
            TrainingPlan: self._training_plan,
            Step: self._step,
            Block: self._step,
            Doing: self._doing,
            Validation: self.validations.append,
            Checkpoint: self.checkpoints.append,
            Checksum: self._checksum,
            Sample: self._sample,
            NodeSample: self._node_sample,
            Finding: self._finding,
            Failure: self._failure,
            Lost: self._lost,
            RunEnded: self._run_ended,
        }

    def apply(self, event: AnyEvent | Block) -> None:
        """Take in one event, or a block that stands for many."""
        if event.time > self.time:
            self.time = event.time
        self._handlers[type(event)](event)
        self.version += 1

    def apply_all(self, events: Iterable[AnyEvent]) -> None:
        """Take in several events."""
        for event in events:
            self.apply(event)

    # What views ask

    @property
    def status(self) -> str:
        """``starting``, ``running``, or how the run ended."""
        if self.ended is not None:
            return self.ended.status
        return "running" if any(view.last is not None for view in self.ranks.values()) else "starting"

    @property
    def step(self) -> int:
        """Optimizer steps that every reporting rank has done."""
        return min((view.step for view in self.ranks.values() if view.last is not None), default=0)

    @property
    def epoch(self) -> int:
        """Epoch of the rank that is furthest behind, from 1; 0 before the first step."""
        return min((view.last.epoch for view in self.ranks.values() if view.last is not None), default=0)

    @property
    def loss(self) -> float | None:
        """Mean over the ranks of the newest loss, nats."""
        losses = [v.last.loss for v in self.ranks.values() if v.last is not None and v.last.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def lr(self) -> float | None:
        """Learning rate of the newest step."""
        return next((v.last.lr for v in self.ranks.values() if v.last is not None), None)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks together, over their last events."""
        rates = [rate for view in self.ranks.values() if (rate := view.recent.samples_per_s) is not None]
        return sum(rates) if rates else None

    @property
    def sync_share(self) -> float | None:
        """Share of recent step time spent waiting for the gradient synchronisation, all ranks, 0 to 1."""
        recent = [view.recent for view in self.ranks.values()]
        synced = sum(totals.synced_ms for totals in recent)
        return sum(totals.exposed_ms for totals in recent) / synced if synced > 0 else None

    @property
    def updates_total(self) -> int | None:
        """Optimizer steps after which the training ends by its own limits, where that is known."""
        limits = [self.max_updates] if self.max_updates else []
        if self.max_epochs and self.plan is not None:
            limits.append(self.max_epochs * self.plan.updates_per_epoch)
        return min(limits) if limits else None

    @property
    def progress(self) -> float | None:
        """Done share of the training, 0 to 1."""
        total = self.updates_total
        return min(self.step / total, 1.0) if total else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the pace of about the last minute, validations included."""
        total, pace = self.updates_total, self.updates_per_s
        if total is None or pace is None:
            return None
        return max(total - self.step, 0) / pace

    @property
    def updates_per_s(self) -> float | None:
        """Optimizer steps per second of wall time, over about the last minute."""
        if len(self._pace) < 2:
            return None
        (time_0, step_0), (time_1, step_1) = self._pace[0], self._pace[-1]
        return (step_1 - step_0) / (time_1 - time_0) if time_1 > time_0 and step_1 > step_0 else None

    @property
    def joined(self) -> list[int]:
        """Ranks that have come through the process group's door."""
        here = ("ready", "training", "validating", "saving", "finished")
        done = {rank for rank, view in self.ranks.items() if view.state in here}
        return sorted(done | set(self.joining.joined if self.joining is not None else ()))

    @property
    def missing(self) -> list[int]:
        """Ranks that the others still wait for."""
        here = set(self.joined)
        return [rank for rank in sorted(self.ranks) if rank not in here]

    def lateness(self) -> dict[int, float]:
        """Return per rank how much later than the first it is ready to synchronise, ms, over recent steps.

        An all-reduce ends everywhere at about the same moment, so ``late_r = max_k E_k - E_r`` of the exposed waits
        E needs no common clock. Steps that every rank reported alone are compared one by one; where events cover
        several steps, the means of the windows are compared.
        """
        reporting = {rank: view for rank, view in self.ranks.items() if view.last is not None}
        if reporting and all(view.lateness for view in reporting.values()):
            return {rank: view.late_ms or 0.0 for rank, view in reporting.items()}
        waits = {r: wait for r, view in self.ranks.items() if (wait := view.recent.mean_exposed_ms) is not None}
        if len(waits) < 2:
            return {}
        longest = max(waits.values())
        return {rank: longest - wait for rank, wait in waits.items()}

    def slowest(self) -> tuple[int, float] | None:
        """Return the rank that the others wait for most, and its mean lateness in ms."""
        late = self.lateness()
        if len(late) < 2:
            return None
        rank = max(late, key=lambda r: (late[r], -r))
        return rank, late[rank]

    def wire_ms(self) -> list[float]:
        """Return the bare transfer time of each gradient bucket, ms: the last rank to arrive waits for no other."""
        times = [view.sampled.bucket_ms for view in self.ranks.values() if view.sampled is not None]
        told = [times_of_rank for times_of_rank in times if times_of_rank is not None]
        if len(told) < 2 or len(told) < self.world_size or len({len(each) for each in told}) != 1:
            return []
        return [min(each) for each in zip(*told, strict=True)]

    @property
    def bus_bytes_per_s(self) -> float | None:
        """What the slowest link carries at least while gradients are reduced: ``S / t * 2 (n - 1) / n``.

        S is what a step reduces. t is the shorter of two times that are both too long: what the last rank to arrive
        saw from its first bucket to the last, and all buckets' bare transfers one after the other.
        """
        n = self.world_size
        steps = [view.sampled for view in self.ranks.values() if view.sampled is not None]
        wire = self.wire_ms()
        if not wire or steps[0].sync_bytes is None:
            return None
        spans = [step.sync_ms for step in steps if step.sync_ms is not None]
        t_ms = min([sum(wire), *spans])
        return steps[0].sync_bytes / (t_ms / 1e3) * 2 * (n - 1) / n if t_ms > 0 else None

    @property
    def overlap_share(self) -> float | None:
        """Share of recent synchronisation that computing hides, all ranks, 0 to 1."""
        recent = [view.recent for view in self.ranks.values()]
        total = sum(totals.sync_ms for totals in recent)
        return max(0.0, 1 - sum(totals.sync_tail_ms for totals in recent) / total) if total > 0 else None

    @property
    def efficiency(self) -> float | None:
        """Live scaling efficiency, 0 to 1: the median rank's own computing as a share of a step."""
        recent = [view.recent for view in self.ranks.values()]
        shares = [share for totals in recent if (share := totals.compute_share) is not None]
        return median(shares) if shares else None

    def last_validation(self, split: str = "valid") -> Validation | None:
        """Return the newest evaluation of a split."""
        return next((v for v in reversed(self.validations) if v.split == split), None)

    def agree(self) -> bool | None:
        """Return whether all ranks hold equal parameters and buffers, None while too few have said."""
        sums = list(self.checksums.values())
        if len(sums) < self.world_size or len({checksum.step for checksum in sums}) != 1:
            return None
        return len({(checksum.parameters, checksum.buffers) for checksum in sums}) == 1

    # What events change

    def rank(self, rank: int) -> RankView:
        """Return the view of a rank, new when it was not heard of before."""
        view = self.ranks.get(rank)
        if view is None:
            view = self.ranks[rank] = RankView(rank, self._history)
            self.world_size = max(self.world_size, rank + 1)
        return view

    def _step(self, event: Step) -> None:
        view = self.ranks.get(event.rank) or self.rank(event.rank)
        if view.first_step_time is None:
            view.first_step_time = event.time
            self.joining = None
        view.last = event
        view.doing = None
        view.events += 1
        if self._history:
            if not view.steps:
                view.started_at = event.step - event.steps
            view.steps.append(event)
        if event.bucket_ms is not None:
            view.sampled = event
        if view.time is None or event.time >= view.time:  # how it ended may stand in another file, read earlier
            view.time = event.time
            view.state = "training"
            if view.fate is not None or self.ended is not None:
                view.fate = fate(view.rank, view.state, view.failure, self.root_cause, self.ended)
        n, samples, step_ms, exposed_ms = event.steps, event.samples, event.step_ms, event.sync_exposed_ms
        (
            steps,
            all_samples,
            tokens,
            sum_ms,
            timed,
            timed_samples,
            parts,
            data,
            compute,
            optimizer,
            synced,
            synced_n,
            exposed,
            loss,
            loss_n,
            sync,
            tail,
        ) = view.totals
        if step_ms is not None:
            covered = step_ms * n
            sum_ms += covered
            timed += n
            timed_samples += samples
            if event.forward_ms is not None:
                parts += covered
                data += ((event.data_ms or 0.0) + (event.h2d_ms or 0.0)) * n
                compute += (event.forward_ms + (event.backward_ms or 0.0)) * n
                optimizer += (event.optimizer_ms or 0.0) * n
            if exposed_ms is not None:
                synced += covered
                synced_n += n
                exposed += exposed_ms * n
                if event.sync_ms is not None:
                    sync += event.sync_ms * n
                    tail += exposed_ms * n
        if event.loss is not None:
            loss += event.loss * n
            loss_n += n
        view.totals = totals = Totals._make(
            (
                steps + n,
                all_samples + samples,
                tokens + (event.tokens or 0),
                sum_ms,
                timed,
                timed_samples,
                parts,
                data,
                compute,
                optimizer,
                synced,
                synced_n,
                exposed,
                loss,
                loss_n,
                sync,
                tail,
            )
        )
        view.marks.append(totals)
        if n > 1:
            view.lateness.clear()
        elif exposed_ms is not None:
            self._waited(event.step, event.rank, exposed_ms)
        if event.rank == 0:
            pace = self._pace
            if not pace or event.time - pace[-1][0] >= 1.0:
                pace.append((event.time, event.step))

    def _doing(self, event: Doing) -> None:
        self.rank(event.rank).doing = event

    def _waited(self, step: int, rank: int, exposed_ms: float) -> None:
        """Note a rank's exposed wait; once all ranks have reported the step, tell who was late."""
        waits = self._open_steps.get(step)
        if waits is None:
            if len(self._open_steps) >= OPEN_STEPS:
                del self._open_steps[next(iter(self._open_steps))]
            waits = self._open_steps[step] = {}
        waits[rank] = exposed_ms
        if len(waits) == self.world_size > 1:
            del self._open_steps[step]
            longest = max(waits.values())
            ranks = self.ranks
            for r, wait in waits.items():
                ranks[r].lateness.append(longest - wait)

    def _run_started(self, event: RunStarted) -> None:
        self.run, self.recipe, self.run_dir = event.run, event.recipe, event.run_dir
        self.world_size = event.world_size
        self.started = event.time if self.started is None else self.started
        self.ended = None
        for rank in range(event.world_size):
            self.rank(rank)
        self._judge()

    def _rank_state(self, event: RankState) -> None:
        view = self.rank(event.rank)
        if event.state == "spawned" and view.last is not None:
            self._start_again(view)
        if view.state in ("finished", "failed") and event.state == "spawned" and view.pid == event.pid:
            return  # the node's parent writes into another file, which may be read later
        view.state = event.state
        view.time = event.time
        view.message = event.message
        if event.state != "failed":
            view.failure = None
        view.fate = fate(view.rank, view.state, view.failure, self.root_cause, self.ended)
        for name in ("local_rank", "node", "host", "device", "pid"):
            value = getattr(event, name)
            if value is not None:
                setattr(view, name, value)

    def _start_again(self, view: RankView) -> None:
        """A restarted rank goes back to its last checkpoint: what it has done stays, its windows begin anew."""
        view.marks.clear()
        view.marks.append(view.totals)
        view.lateness.clear()
        for series in (view.steps, view.rss_bytes, view.gpu_bytes):
            series.clear()
        view.sampled = view.doing = None
        self._open_steps.clear()
        self._pace.clear()

    def _joining(self, event: Joining) -> None:
        self.joining = event

    def _training_plan(self, event: TrainingPlan) -> None:
        self.plan = event
        self.max_updates, self.max_epochs = event.max_updates, event.max_epochs

    def _checksum(self, event: Checksum) -> None:
        self.checksums[event.rank] = event

    def _sample(self, event: Sample) -> None:
        self.sample = event

    def _node_sample(self, event: NodeSample) -> None:
        self.nodes[event.node] = event
        for process in event.ranks:
            view = self.rank(process.rank)
            view.process = process
            if self._history and view.steps and process.rss_bytes is not None:
                view.rss_bytes.append((event.time, process.rss_bytes))
        for gpu in event.gpus:
            if gpu.rank is not None:
                view = self.rank(gpu.rank)
                view.gpu = gpu
                if self._history and view.steps and gpu.memory_used_bytes is not None:
                    view.gpu_bytes.append((event.time, gpu.memory_used_bytes))

    def _finding(self, event: Finding) -> None:
        self.past_findings.append(event)
        if event.state == "raised":
            self.findings[event.kind, event.rank] = event
        else:
            self.findings.pop((event.kind, event.rank), None)

    def _failure(self, event: Failure) -> None:
        self.failures.append(event)
        before, self.root_cause = self.root_cause, root_cause((int(f.time * 1e9), f) for f in self.failures)
        if event.rank is not None:
            view = self.rank(event.rank)
            view.state, view.time, view.failure = "failed", event.time, event
            view.fate = fate(view.rank, view.state, view.failure, self.root_cause, self.ended)
        if self.root_cause is not before:
            self._judge()

    def _lost(self, event: Lost) -> None:
        self.lost += event.events

    def _run_ended(self, event: RunEnded) -> None:
        self.ended = event
        self._judge()

    def _judge(self) -> None:
        """Tell the ranks that failed by themselves from those that were ended, by what is known now."""
        for view in self.ranks.values():
            view.fate = fate(view.rank, view.state, view.failure, self.root_cause, self.ended)
