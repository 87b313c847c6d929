"""Folds the events of a run into its state; no I/O, no clock, bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gputrain_tui.state.best_validation import RecordedValidations
from gputrain_tui.state.checksums import DesyncState
from gputrain_tui.state.counted_anew import begins_at_1, counts_anew
from gputrain_tui.state.elapsed import Pace, elapsed_s, time_by_boot
from gputrain_tui.state.ended_attempts import EndedAttempts
from gputrain_tui.state.figures import RunFigures, run_figures
from gputrain_tui.state.finding_text import NO_STEPS, loss_is_nan, named_ranks
from gputrain_tui.state.job_queue import JobQueue
from gputrain_tui.state.newest_metrics import NewestMetrics
from gputrain_tui.state.rank_state import KEPT, RankView, rank_outcome
from gputrain_tui.state.record_gaps import RECORD_ADVICE, gap_text
from gputrain_tui.state.share_changes import ShareChanges
from gputrain_tui.state.synchronisation import bus_bytes_per_s, lateness, latest, synchronised
from gputrain_tui.state.world import divided, is_of_former, samples_of_attempt, still_standing
from trainer.contract import record
from trainer.contract.outcome import RECORD_END_MISSING, REQUEUED, RESTARTED, root_cause
from trainer.contract.record.downsampled import DownsampledBlock
from trainer.contract.record.unrecorded import RECORD_INCOMPLETE


class RunState:
    """The state of a run, changed by ``apply`` only.

    ``version`` grows with every event, so that a view repaints only when there is something new.
    """

    def __init__(self, *, world_size: int = 0, max_updates: int = 0, max_epochs: int = 0, history: int = 0) -> None:
        """Start without events; the diagnosis needs the last ``history`` step events of each rank, views do not."""
        self.version = 0
        self._history = history
        self.run = self.recipe = self.run_dir = ""
        self.world_size = world_size
        self.max_updates = max_updates  # 0: no limit, as below
        self.max_epochs = max_epochs
        self.plan: record.TrainingPlan | None = None
        self.started: float | None = None
        self.ended: record.RunEnded | None = None
        self.queue = JobQueue()
        self.time = 0.0
        self.step_time = 0.0
        """Newest time of a step event, Unix seconds."""
        self.ranks: dict[int, RankView] = {rank: RankView(rank, history) for rank in range(world_size)}
        self.former: dict[int, RankView] = {}
        """Ranks that only attempts before the last one had."""
        self.joining: record.Joining | None = None
        """Newest report of the ranks that have joined; None once training began."""
        self.validations = RecordedValidations(KEPT)
        self.checkpoints: deque[record.Checkpoint] = deque(maxlen=KEPT)
        self.failures: deque[record.Failure] = deque(maxlen=KEPT)
        self.root_cause: record.Failure | None = None
        """The supervisor's failure, or else the earliest one of the last attempt that is no consequence of another."""
        self.findings: dict[tuple[str, int | None], record.Finding] = {}
        """Findings that were raised and not cleared, by kind and rank."""
        self.past_findings: deque[record.Finding] = deque(maxlen=KEPT)
        self.ended_attempts = EndedAttempts()
        self.desync, self.shares = DesyncState(), ShareChanges()
        self.nodes: dict[int, record.NodeSample] = {}
        self.sample: record.Sample | None = None
        self.noise_scale: record.NoiseScale | None = None
        self.metrics = NewestMetrics()
        """The user's own."""
        self.silence_ended_at = 0.0
        """When a silent host answered again last, Unix seconds."""
        self.longest_stay_s: dict[str, float] = {}
        """By stage, the longest completed stay of any rank; recorded where the run keeps a history."""
        self.stacks: dict[int, record.RankStacks] = {}
        """By rank, the newest answer to a request for its stacks."""
        self._pace = Pace()
        self._attempt = 1
        self.attempt_began = 0.0
        """Time at which the newest attempt after the first one began, Unix seconds; 0 in the first one."""
        self._figures = RunFigures()
        self._late: dict[int, float] = {}
        self._synchronised: Sequence[frozenset[int]] | None = None
        self._figures_version = self._late_version = -1
        self._handlers: dict[type[record.Event], Callable[[Any], None]] = {
            record.RunStarted: self._run_started,
            record.World: self._world,
            record.RankState: self._rank_state,
            record.Joining: partial(setattr, self, "joining"),
            record.Unheard: lambda event: setattr(self.rank(event.rank), "unheard", frozenset(event.ranks)),
            record.TrainingPlan: self._training_plan,
            record.ShareChange: lambda event: self.shares.add(event, self.ranks),
            record.ModelFlops: lambda event: setattr(self.rank(event.rank), "flops", event),
            record.Step: self._step,
            DownsampledBlock: self._step,
            record.Doing: self._doing,
            record.Validation: self.validations.add,
            record.Checkpoint: self.checkpoints.append,
            record.Checksum: lambda event: self.desync.add(event, self.world_size),
            record.CollectiveGroup: self._collective_group,
            record.Sample: partial(setattr, self, "sample"),
            record.NoiseScale: partial(setattr, self, "noise_scale"),
            record.Metrics: self.metrics.apply,
            record.NodeSample: self._node_sample,
            record.Finding: self._finding,
            record.Failure: self._failure,
            record.RankStacks: self._rank_stacks,
            record.Lost: lambda e: self.add_gap(e.time, f"{e.events} events were not recorded: {e.message}"),
            record.RunEnded: self._run_ended,
            record.Queued: self.queue.wait,
        }

    def apply(self, event: record.AnyEvent | DownsampledBlock) -> None:
        """Apply one event, or a downsampled block."""
        if event.time > self.time:
            self.time = event.time
        self._handlers[type(event)](event)
        self.version += 1

    def apply_all(self, events: Iterable[record.AnyEvent]) -> None:
        for event in events:
            self.apply(event)

    # Read by views

    @property
    def status(self) -> str:
        """``queued``, ``starting``, ``running``, or how the run ended."""
        if self.ended is not None:
            return self.ended.status
        if self.queue.is_waiting:
            return "queued"  # also between two jobs
        return "running" if any(view.last is not None for view in self.ranks.values()) else "starting"

    @property
    def step(self) -> int:
        """Optimizer steps that every reporting rank has done."""
        return min((view.step for view in self.ranks.values() if view.last is not None), default=0)

    @property
    def unmeasured(self) -> record.Finding | None:
        """Why no step of a script was measured, by its first rank; None where that is not known."""
        found = (each for each in self.findings.values() if each.cause == NO_STEPS)
        return min(found, key=lambda each: each.rank or 0, default=None)

    @property
    def has_progressed(self) -> bool:
        """Whether a rank has made a step since the ranks were started last."""
        steps = () if self.queue.is_before_ranks else (view.attempt_step for view in self.ranks.values())
        return max(steps, default=0) > (self.plan.first_update if self.plan is not None else 0)

    @property
    def figures(self) -> RunFigures:
        if self._figures_version != self.version:
            self._figures, self._figures_version = run_figures(self.ranks.values()), self.version
        return self._figures

    @property
    def elapsed_s(self) -> float | None:
        """How long the run took, seconds, or until its newest event; None before its start."""
        if self.started is None:
            return None
        until = self.time if self.ended is None else self.ended.time
        ms = None if self.ended is None else self.ended.elapsed_ms
        return elapsed_s(started=self.started, until=until, measured_s=None if ms is None else ms / 1e3)

    @property
    def span(self) -> str:
        """Steps that the mean figures are taken over, as text."""
        if self.ended is not None:
            return "whole run"
        return f"last {max((view.recent.steps for view in self.ranks.values()), default=0):,} steps"

    @property
    def updates_total(self) -> int | None:
        """Optimizer steps after which the training ends by its own limits, where that is known."""
        limits = [self.max_updates] if self.max_updates else []
        if self.max_epochs and self.plan is not None and self.plan.updates_per_epoch:
            limits.append(self.plan.last_update or self.max_epochs * self.plan.updates_per_epoch)
        return min(limits) if limits else None

    @property
    def progress(self) -> float | None:
        total = self.updates_total
        return min(self.step / total, 1.0) if total else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the pace of about the last minute, validations included."""
        total, pace = self.updates_total, self.updates_per_s
        return None if total is None or pace is None else max(total - self.step, 0) / pace

    @property
    def updates_per_s(self) -> float | None:
        return self._pace.updates_per_s

    @property
    def loss_unit(self) -> str:
        return self.plan.loss_unit if self.plan is not None else ""

    @property
    def joined(self) -> list[int]:
        joined_states = ("ready", "training", "validating", "saving", "finished")
        done = {rank for rank, view in self.ranks.items() if view.state in joined_states}
        return sorted(done | set(self.joining.joined if self.joining is not None else ()))

    @property
    def missing(self) -> list[int]:
        return sorted(self.ranks.keys() - set(self.joined))

    @property
    def record_gap(self) -> str:
        """Why the record is incomplete, so that its figures are of a part of the run; empty where it is whole."""
        return gap_text(self.findings)

    @property
    def counts_all_steps(self) -> bool:
        """Whether steps and samples that the record lacks are counted by what the ranks have told."""
        views = self.ranks.values()
        return any(view.unrecorded for view in views) and len({view.step for view in views}) == 1

    @property
    def counts_anew(self) -> bool:
        views = (*self.ranks.values(), *self.former.values())
        return counts_anew((view.beginnings for view in views), is_task=self.plan is not None)

    @property
    def flagged(self) -> set[int]:
        """Ranks with a raised finding, and ranks that failed by themselves."""
        named = named_ranks(self.findings.values())
        failed = {view.rank for view in self.ranks.values() if view.display_state == "failed"} if self.failures else ()
        return named.union(failed)

    def lateness(self) -> dict[int, float]:
        """Return the lateness by rank, ms, by ``synchronisation.lateness``."""
        if self._late_version != self.version:
            self._late = lateness(self.ranks.values(), self.synchronised(), self.findings.values())
            self._late_version = self.version
        return self._late

    def synchronised(self) -> Sequence[frozenset[int]]:
        """Return the sets of ranks that wait for each other, directly or through others."""
        if self._synchronised is None:
            self._synchronised = synchronised(self.ranks.values())
        return self._synchronised

    def latest(self) -> tuple[int, float] | None:
        """Return the rank that the others wait for most, the straggler where one is found, and its lateness in ms."""
        return latest(self.lateness(), self.findings)

    @property
    def bus_bytes_per_s(self) -> float | None:
        return bus_bytes_per_s(self.ranks.values(), self.world_size)

    # Changed by events

    def rank(self, rank: int) -> RankView:
        """Return the view of a rank, and create it for a rank without events."""
        view = self.ranks.get(rank) or self.former.get(rank)
        if view is None:
            view = self.ranks[rank] = RankView(rank, self._history)
            self._synchronised = None
            view.over = self.ended is not None
            self.world_size = max(self.world_size, rank + 1)
        return view

    def _step(self, event: record.Step) -> None:
        view = self.ranks.get(event.rank) or self.rank(event.rank)
        if self._history:
            self._record_stay(view, event.time)
            view.entered = event.time
        if view.first_step_time is None:
            view.first_step_time = event.time
            self.joining = None
        view.unrecorded_step = 0
        view.beginnings += begins_at_1(event)
        if event.time > self.step_time:
            self.step_time = event.time
        view.note(event)
        if self._history:
            if not view.steps:
                view.started_at = event.step - event.steps
            view.steps.append(event)
        if event.bucket_ms is not None:
            if view.bucket_step is None:
                self._synchronised = None
            view.bucket_step = event
        if event.groups:
            view.groups.note(event)
        if view.time is None or event.time >= view.time:  # its end may come from another file, read earlier
            view.time = event.time
            view.state = "training"
            if view.outcome is not None or self.ended is not None:
                self._update_outcome(view)
        view.totals = totals = view.totals.plus(event)
        view.totals_window.append(totals)
        if event.rank == 0:
            self._pace.note(time_by_boot(event), event.step)

    def _collective_group(self, event: record.CollectiveGroup) -> None:
        self.rank(event.rank).groups.add(event)
        self._synchronised = None

    def _doing(self, event: record.Doing) -> None:
        view = self.rank(event.rank)
        if event.part in ("sync", "group"):  # it has done its own part, and waits for the others
            self._record_stay(view, event.time - event.waited_ms / 1e3)
        if event.part == "group":
            view.entered = event.time
        view.doing = event

    def _record_stay(self, view: RankView, until: float) -> None:
        if view.entered is not None and until - view.entered > self.longest_stay_s.get(view.stage, -1.0):
            self.longest_stay_s[view.stage] = until - view.entered

    def _run_started(self, event: record.RunStarted) -> None:
        self.run, self.recipe, self.run_dir = event.run, event.recipe, event.run_dir
        self.world_size = event.world_size
        self.started = event.time if self.started is None else self.started
        self.ended = None
        self.queue.begin()
        for rank in range(event.world_size):
            self.rank(rank)
        self._update_outcomes()

    def _world(self, event: record.World) -> None:
        """Let the run have other ranks: those that are gone hold no figure, and no finding is about them."""
        self.world_size = event.world_size
        self.ranks, self.former = divided(self.ranks, self.former, event.world_size)
        self._synchronised = None
        for rank in range(event.world_size):
            self.rank(rank)
        self.findings = {(each.kind, each.rank): each for each in still_standing(self.findings.values(), self.former)}
        if event.attempt:  # the attempt before is over, on all nodes
            self.joining = None
            self.nodes = samples_of_attempt(self.nodes, self.former, event.time)
            self.desync.restart(event.world_size, event.time)

    def _rank_state(self, event: record.RankState) -> None:
        view = self.rank(event.rank)
        view.awaits_start &= event.state in ("finished", "failed")
        if event.state == "spawned":
            view.starts += 1
            self.queue.spawn(event.time)
            if view.starts > self._attempt:
                self._attempt, self.attempt_began = view.starts, event.time
                self._attribute()
            if view.last is not None:
                view.restarted_at = event.time
                if view.awaits_first_step:
                    view.restart()
                    self.desync.drop_rank(view.rank)
                    self._pace.reset()
            begun = view.pid is not None and view.state not in (None, "spawned")
            if (begun or view.state in ("finished", "failed")) and view.pid == event.pid:
                view.versions = event.versions  # the node agent's file may be read later than the rank's
                return
            view.unheard = None
        if event.state != view.state and event.state not in ("spawned", "failed"):  # those interrupt a stay
            self._record_stay(view, event.time)
        if event.state != view.state or event.state in ("spawned", "failed"):
            view.entered = event.time
        view.enter(event)
        self._update_outcome(view)

    def _training_plan(self, event: record.TrainingPlan) -> None:
        self.plan = event
        self.validations.begin(event)
        self.max_updates, self.max_epochs = event.max_updates, event.max_epochs

    def _node_sample(self, event: record.NodeSample) -> None:
        if is_of_former(event, self.former):
            return
        self.nodes[event.node] = event
        for process in event.ranks:
            self.rank(process.rank).sample_process(process, event.time)
        for gpu in event.gpus:
            if gpu.rank is not None:
                self.rank(gpu.rank).sample_gpu(gpu, event.time)

    def _finding(self, event: record.Finding) -> None:
        self.ended_attempts.follow(event, self.past_findings, step_time=self.step_time)
        self.past_findings.append(event)
        self.queue.wait(event)
        if event.kind == RECORD_INCOMPLETE and event.rank is not None:
            self.rank(event.rank).count_unrecorded(event)
        for view in self.ranks.values() if event.kind in (RESTARTED, REQUEUED) else ():
            view.awaits_start = True
        if event.kind == RESTARTED:  # the failure before is no longer that of the run
            self.attempt_began = event.time
            self._attribute()
        if event.kind == "host_silent" and event.state == "cleared":
            self.silence_ended_at = event.time
        if event.state == "raised":
            self.findings[event.kind, event.rank] = event
        else:
            self.findings.pop((event.kind, event.rank), None)
        if event.kind == "non_finite":
            for view in self.ranks.values():
                view.loss_is_nan = loss_is_nan(self.findings.values())

    def _failure(self, event: record.Failure) -> None:
        self.failures.append(event)
        if event.rank is not None:
            view = self.rank(event.rank)
            view.state, view.time, view.failure = "failed", event.time, event
        if not self._attribute() and event.rank is not None:
            self._update_outcome(view)

    def _attribute(self) -> bool:
        """Attribute the failures of the last attempt to their root cause; return whether that has changed.

        Once the run has ended, it is the failure that the supervisor names: the last attempt may have had no rank.
        """
        message = self.ended.message or "" if self.ended is not None and self.ended.status == "failed" else ""
        named = [failure for failure in self.failures if failure.message and message.startswith(failure.message)]
        longest = max((len(failure.message) for failure in named), default=0)  # others are the beginning of its text
        named = sorted((each for each in named if len(each.message) == longest), key=lambda each: each.time)
        recent = [each for each in named or self.failures if each.time >= self.attempt_began] or named[-1:]
        before, self.root_cause = self.root_cause, root_cause((int(f.time * 1e9), f) for f in recent)
        if self.root_cause is not before:
            self._update_outcomes()
        return self.root_cause is not before

    def _rank_stacks(self, event: record.RankStacks) -> None:
        before = self.stacks.get(event.rank)
        if before is None or event.request >= before.request:  # native frames may come after the answer to a newer one
            self.stacks[event.rank] = event

    def add_gap(self, time: float, message: str) -> None:
        """Add the finding that events are missing in the record, unless the gaps that stand say the same."""
        if self.record_gap and message.endswith(self.record_gap):
            return
        self._finding(record.Finding(time=time, kind=RECORD_INCOMPLETE, message=message, advice=RECORD_ADVICE))

    def _run_ended(self, event: record.RunEnded) -> None:
        self.ended = event
        if RECORD_END_MISSING in (event.message or ""):
            self.add_gap(event.time, event.message or "")
        self._attribute()
        self._update_outcomes()

    def _update_outcomes(self) -> None:
        """Update the outcome of every rank, and whether the run has ended."""
        for view in self.ranks.values():
            view.over = self.ended is not None
            self._update_outcome(view)

    def _update_outcome(self, view: RankView) -> None:
        view.outcome = rank_outcome(view, self.root_cause, self.ended)
