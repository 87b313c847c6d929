"""The state of one rank."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import InitVar, dataclass, field
from typing import Any

from gputrain_tui.state.process_groups import RankGroups
from gputrain_tui.state.step_losses import loss_at, samples_at
from gputrain_tui.state.totals import ZERO_TOTALS, Totals
from trainer.contract.balanced_shares import ComputeTime
from trainer.contract.record import (
    Doing,
    Failure,
    Finding,
    GpuSample,
    ModelFlops,
    RankSample,
    RankState,
    RunEnded,
    Step,
)
from trainer.contract.record.unrecorded import COUNTS

WINDOW = 50
"""Step events of a rank that its recent means cover."""
KEPT = 1000
"""Memory bound of each list of a run's events: a view shows the newest few."""
MAX_GAPS = 100
"""Maximum number of gaps of a rank's record that are told apart."""
MEMORY_SAMPLES = 600
"""Machine samples, one a second, over which a rank's memory is followed for the diagnosis."""


@dataclass(slots=True, eq=False)
class RankView:
    """Latest known state of one rank."""

    rank: int
    history: InitVar[int] = 0
    state: str | None = None
    """State of its last ``rank_state``; None before it was spawned."""
    node: int | None = None
    host: str | None = None
    local_rank: int | None = None
    device: str | None = None
    pid: int | None = None
    threads: int | None = None
    """Threads on which torch computes on the CPU."""
    versions: dict[str, str] | None = None
    """Those of its host, if it is the host's first rank."""
    starts: int = 0
    message: str | None = None
    failure: Failure | None = None
    """Reported by the rank or its node agent."""
    outcome: str | None = None
    """How it ended because of another rank or the run, as ``rank_outcome`` returns it."""
    time: float | None = None
    """Time of its newest event, Unix seconds."""
    awaits_start: bool = False
    """Whether the newest attempt has begun, and this rank was not started in it yet."""
    restarted_at: float | None = None
    """When its process was last started again after steps, Unix seconds."""
    first_step_time: float | None = None
    """Time of its first step event, Unix seconds."""
    last: Step | None = None
    unrecorded: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Steps, samples and tokens that its record lacks, by the begin of each gap, Unix seconds; the totals have them."""
    beginnings: int = 0
    """How often its steps began at 1."""
    unrecorded_step: int = 0
    """The last step that it has done, where the record lacks that; else 0."""
    before: Step | None = None
    """The step event before ``last``, for the loss at the newest step of all ranks, which may not be in ``last``."""
    doing: Doing | None = None
    """Its position within a step that takes unusually long, or outside of steps while it waits for others."""
    unheard: frozenset[int] | None = None
    """Ranks of other hosts whose heartbeats have stopped, as this rank sees it; None where it reads none."""
    entered: float | None = None
    """When it ended its last step or entered its stage, Unix seconds by its own clock."""
    validation_turns: int = 0
    """Begins and ends of validations since it was last started; odd during a validation."""
    events: int = 0
    rss_peak_bytes: int | None = None
    """Maximum memory of its process over the samples."""
    totals: Totals = ZERO_TOTALS
    totals_at_start: Totals = ZERO_TOTALS
    """Totals of the rank when it was last started."""
    flops: ModelFlops | None = None
    """Operations of its samples, and the peak of its GPU; None until it has counted them since it was last started."""
    share: int | None = None
    """Samples, or tokens, of a micro-step that it has of the global batch, where shares are balanced."""
    fit: ComputeTime | None = None
    """Its compute as the shares' balance has measured it."""
    totals_window: deque[Totals] = field(default_factory=lambda: deque([ZERO_TOTALS], maxlen=WINDOW + 1))
    """Totals after each of the last events; the first is the state before the window."""
    loss_is_nan: bool = False
    """Whether a finding stands that losses are not numbers, which the record leaves out."""
    over: bool = False
    """Whether the run has ended, so that its figures are over the whole run."""
    steps: deque[Step] = field(init=False)
    """Its last ``history`` step events since it was last started."""
    started_at: int = 0
    """Optimizer steps done when it was last started."""
    bucket_step: Step | None = None
    """Its newest step event with the time of each bucket."""
    own_norm: Step | None = None
    """Its newest step event with the norm of its own gradient, which is not measured in every step."""
    groups: RankGroups = field(default_factory=lambda: RankGroups(WINDOW))
    """Its process groups, and its collectives besides those of DDP's buckets."""
    rss_bytes: deque[tuple[float, int]] = field(init=False)
    """Its process's memory since its first step, with the time, where the run keeps a history."""
    gpu_bytes: deque[tuple[float, int]] = field(init=False)
    """Likewise its GPU's."""
    process: Any = None
    gpu: Any = None

    def __post_init__(self, history: int) -> None:
        self.steps = deque(maxlen=history)
        self.rss_bytes, self.gpu_bytes = (deque(maxlen=MEMORY_SAMPLES if history else 0) for _ in range(2))

    def restart(self) -> None:
        """Begin again from a checkpoint: the totals stay, the windows start empty."""
        self.totals_at_start, self.flops = self.totals, None
        self.totals_window.clear()
        self.totals_window.append(self.totals)
        for series in (self.steps, self.rss_bytes, self.gpu_bytes):
            series.clear()
        self.groups.clear()
        self.bucket_step = self.own_norm = self.doing = None
        self.validation_turns = 0

    def enter(self, event: RankState) -> None:
        """Take a state that it has told."""
        if event.state != self.state:
            self.doing = None
        if (event.state == "validating") != bool(self.validation_turns % 2):
            self.validation_turns += 1
        self.state, self.time, self.message = event.state, event.time, event.message
        if event.state != "failed":
            self.failure = None
        for name in ("local_rank", "node", "host", "device", "pid", "threads", "versions"):
            value = getattr(event, name)
            if value is not None:
                setattr(self, name, value)

    def note(self, event: Step) -> None:
        """Take its newest step event."""
        self.before, self.last = self.last, event
        if event.local_grad_norm is not None:
            self.own_norm = event
        self.doing = None
        self.events += 1

    def sample_process(self, process: RankSample, time: float) -> None:
        """Take a sample of its process."""
        self.process = process
        if process.rss_bytes is not None:
            self.rss_peak_bytes = max(process.rss_bytes, self.rss_peak_bytes or 0)
            if self.steps:
                self.rss_bytes.append((time, process.rss_bytes))

    def sample_gpu(self, gpu: GpuSample, time: float) -> None:
        """Take a sample of its GPU."""
        self.gpu = gpu
        if self.steps and gpu.memory_used_bytes is not None:
            self.gpu_bytes.append((time, gpu.memory_used_bytes))

    @property
    def step(self) -> int:
        return self.unrecorded_step or (self.last.step if self.last is not None else 0)

    def count_unrecorded(self, gap: Finding) -> None:
        """Add the steps that the record lacks by a ``record_incomplete`` finding, in place of those told before."""
        began, steps, samples, tokens = (int(gap.evidence.get(key, 0)) for key in ("began", *COUNTS))
        if not began or (began not in self.unrecorded and len(self.unrecorded) >= MAX_GAPS):
            return
        before = self.unrecorded.get(began, (0, 0, 0))
        self.unrecorded[began] = (steps, samples, tokens)
        totals = self.totals
        self.totals = totals._replace(
            steps=totals.steps + steps - before[0],
            samples=totals.samples + samples - before[1],
            tokens=totals.tokens + tokens - before[2],
            counted_steps=totals.counted_steps + steps * bool(samples) - before[0] * bool(before[1]),
        )
        done = int(gap.evidence.get("step", 0)) if gap.state == "raised" and gap.cause else 0
        self.unrecorded_step = done if self.last is None or gap.time >= self.last.time else 0

    @property
    def loss(self) -> float | None:
        return self.loss_at(self.step)

    def loss_at(self, step: int) -> float | None:
        """Return its loss at one of its newest steps, nats; NaN where that is why the record has none."""
        loss = loss_at((event for event in (self.last, self.before) if event is not None), step)
        return math.nan if loss is None and self.loss_is_nan and self.last is not None else loss

    def loss_and_samples_at(self, step: int) -> tuple[float | None, float | None]:
        """Return its loss, as ``loss_at``, and its samples at one of its newest steps; None where not known."""
        last = self.last
        if last is not None and last.step == step and last.losses is None and last.loss is not None:
            return last.loss, None if last.samples is None else last.samples / last.steps
        return self.loss_at(step), samples_at((event for event in (last, self.before) if event is not None), step)

    @property
    def stage(self) -> str:
        """Its state, or ``first_step`` before its first step.

        ``group`` while it waits for others outside of steps, ``compile`` while torch.compile is at work, ``threads``
        while only threads of an ended script keep it.
        """
        if self.doing is not None and self.doing.part in ("group", "compile", "threads"):
            return self.doing.part
        if self.state == "training" and self.awaits_first_step:
            return "first_step"
        return self.state or "spawned"

    @property
    def awaits_first_step(self) -> bool:
        """Whether it has done no step since it was last started; ``step`` is then that of an attempt before."""
        return self.last is None or (self.restarted_at is not None and self.last.time <= self.restarted_at)

    @property
    def attempt_step(self) -> int:
        """Its last step, as the steps of the newest attempt count; 0 before the first one of that."""
        return 0 if self.awaits_first_step else self.step

    @property
    def display_state(self) -> str | None:
        """Its outcome, or else its state: ``failed`` only for a rank that failed by itself."""
        return self.outcome or self.state

    @property
    def phase(self) -> str | None:
        """The phase of a step that takes unusually long; None while steps come, and after the end."""
        going = self.state == "training" and self.outcome is None and not self.over
        return self.doing.part if self.doing is not None and going else None

    @property
    def recent(self) -> Totals:
        return self.totals.since(self.totals_window[0])

    @property
    def sums(self) -> Totals:
        """Sums that its figures are means over: its last steps while the run goes on, all of them after its end."""
        return self.totals if self.over else self.recent

    @property
    def memory_bytes(self) -> int | None:
        """Memory used: of its GPU where it has one, of its process otherwise."""
        if self.gpu is not None and self.gpu.memory_used_bytes is not None:
            return int(self.gpu.memory_used_bytes)
        if self.process is not None and self.process.rss_bytes is not None:
            return int(self.process.rss_bytes)
        return None

    @property
    def memory_peak_bytes(self) -> int | None:
        """Peak memory of its tensors on its GPU, or of its process without one."""
        on_gpu = self.last.memory_peak_bytes if self.last is not None else None
        return on_gpu or self.rss_peak_bytes


LOST_PEER = "lost peer"
"""It failed because another rank was gone."""
STOPPED = "stopped"
"""It was ended because another one failed, or with the run."""
RANK_OUTCOMES = (LOST_PEER, STOPPED)


def rank_outcome(view: RankView, cause: Failure | None, ended: RunEnded | None) -> str | None:
    """Return how a rank ended because of another one or the run; None for every other rank.

    ``cause`` is the root cause of the run's failure.
    """
    if view.state == "failed":
        if cause is None or cause.rank == view.rank:
            return None
        kind = view.failure.kind if view.failure is not None else "stopped"
        if kind in ("lost_peer", "join_timeout"):
            return LOST_PEER
        return STOPPED if kind in ("signal", "exit", "stopped") else None
    over = ended is not None and ended.status != "finished"
    return STOPPED if over and view.state not in (None, "finished") else None
