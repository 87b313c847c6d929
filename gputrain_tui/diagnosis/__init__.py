"""Derives findings with cause, evidence and advice from the state of a run; no I/O, no clock.

Each check measures symptoms. ``Diagnosis`` adds hysteresis: a finding is raised once, anew only if it has grown much,
and cleared only well below its threshold. It keeps the steps that it has read, so that the cost of an update depends on
new events only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from traceback import extract_tb
from typing import TypeVar

from msgspec.structs import replace

from gputrain_tui.diagnosis.bounds import bounds, outside_torch
from gputrain_tui.diagnosis.contention import Contention, throttled_ranks
from gputrain_tui.diagnosis.gpu_throttling import GpuThrottling
from gputrain_tui.diagnosis.hang import hang
from gputrain_tui.diagnosis.health import NonFinite, desync, loss_spikes
from gputrain_tui.diagnosis.imbalance import Imbalance
from gputrain_tui.diagnosis.lost_hosts import lost_nodes
from gputrain_tui.diagnosis.memory_growth import MemoryGrowth
from gputrain_tui.diagnosis.periodic_delays import PeriodicDelays
from gputrain_tui.diagnosis.rank_activity import RankActivity
from gputrain_tui.diagnosis.row import StepRow
from gputrain_tui.diagnosis.slow_evaluations import SlowEvaluations
from gputrain_tui.diagnosis.stall import stalls
from gputrain_tui.diagnosis.straggler import stragglers
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.diagnosis.thresholds import CLEAR_SHARE, CROWDED_RATIO, GROWN_RATIO, HISTORY, WINDOW_ROWS
from gputrain_tui.diagnosis.timeline import Timeline
from gputrain_tui.diagnosis.uneven_speeds import UnevenSpeeds
from gputrain_tui.state import RunState
from trainer.contract.record import Failure, Finding, NodeSample

__all__ = ["HISTORY", "KINDS", "OTHER_KINDS", "Diagnosis"]

KINDS = frozenset((
    "straggler", "imbalance", "input_bound", "communication_bound", "cpu_contention", "memory_creep", "non_finite",
    "loss_spike", "outside_torch", "stalled", "gpu_throttled", "desync", "uneven_speeds", "slow_evaluation",
    "periodic_delay",
))  # fmt: skip
"""Kinds of findings that this package raises; ``desync`` is also raised by ranks that compare themselves."""
OTHER_KINDS = frozenset((
    "checkpoint_lost", "data_changed", "host_silent", "metric_is_mean", "metrics_left_out", "no_gradient",
    "no_process_group", "non_finite_validation", "not_compared", "not_compiled", "not_diagnosed", "not_measured",
    "not_optimized", "not_reported", "not_resumed", "port_taken", "recompiled", "record_incomplete", "requeued",
    "restarted", "unused_parameters",
))  # fmt: skip
"""Kinds that ranks, node agents and supervisors raise by themselves."""

Key = tuple[str, int | None]
T = TypeVar("T")


class Diagnosis:
    """The findings of a run and their hysteresis."""

    def __init__(self) -> None:
        self.stall_timeout_s: float | None = None
        """``cluster.stall_timeout``, if it is fixed."""
        self._raised: dict[Key, tuple[Finding, float]] = {}
        """Raised findings, each with the value below which it is cleared."""
        self._timeline = Timeline()
        self._imbalance = Imbalance()
        self._uneven_speeds = UnevenSpeeds()
        self._contention = Contention()
        self._gpu_throttling = GpuThrottling()
        self._memory = MemoryGrowth()
        self._evaluations = SlowEvaluations()
        self._delays = PeriodicDelays()
        self._non_finite = NonFinite()
        self._activity = RankActivity()
        self._samples: dict[int, NodeSample] = {}
        """Of each node the newest sample with ranks: at the end of a run they are gone."""
        self._adopted = False
        self._failed: dict[str, str] = {}
        """Checks that have failed by a defect of their own and are not made again; why, or nothing once reported."""

    def update(self, state: RunState, now: float) -> list[Finding]:
        """Return the findings raised or cleared since the last update of a state that keeps ``HISTORY`` step events."""
        if not self._adopted:  # the findings that an earlier process has raised and not cleared
            self._adopted = True
            self._raised = {key: (finding, 0.0) for key, finding in state.findings.items() if finding.diagnosed}
        self._activity.update(state, now)
        present: dict[Key, Symptom] = {}
        for symptom in self._symptoms(state, now):
            key = (symptom.kind, symptom.rank)
            if key not in present or present[key].value < symptom.value:
                present[key] = symptom
        events = [*self._clear(present, state, now), *self._failures(now)]
        for key, symptom in present.items():
            if symptom.is_certain and self._is_new(key, symptom):
                finding = symptom.finding(None if symptom.rank is None else state.ranks.get(symptom.rank), now)
                self._raised[key] = finding, CLEAR_SHARE * symptom.threshold
                if finding.kind == "straggler":
                    for row in self._timeline.last(WINDOW_ROWS):
                        row.straggling = True
                events.append(finding)
        return events

    def follow(self, state: RunState, now: float) -> None:
        """Note the ranks' progress, without a diagnosis, as while a host is silent whose record ends early."""
        self._activity.update(state, now)

    def lost_nodes(
        self, state: RunState, now: float, silent_s: Mapping[int, float], *, timeout_s: float
    ) -> Sequence[int]:
        """Return the nodes whose hosts are lost, by ``lost_hosts.lost_nodes``."""
        return lost_nodes(state, self._activity, now, silent_s, timeout_s=timeout_s)

    def hang(self, state: RunState, now: float, *, timeout_s: float | None, limit_s: float) -> Failure | None:
        """Return the failure of a rank that hangs for good, by ``hang.hang``; None if none does."""
        return hang(state, self._activity, now, timeout_s=timeout_s, limit_s=limit_s)

    def waited_s(self, state: RunState, now: float) -> float:
        """Return the time since the last progress of any rank that runs, seconds; 0 without one."""
        views = [view for view in state.ranks.values() if view.state not in ("finished", "failed")]
        since = state.silence_ended_at
        return min((self._activity.silence_s(view, now, since=since) for view in views), default=0.0)

    def _symptoms(self, state: RunState, now: float) -> list[Symptom]:
        """Return all symptoms that are present now; a check that fails does not keep the others from being made."""
        symptoms: list[Symptom] = []
        added = self._attempt("the comparison of ranks", lambda: self._new_rows(state))
        for name, check in self._checks(state, now, added).items():
            symptoms += self._attempt(name, check) or ()
        return symptoms

    def _attempt(self, name: str, check: Callable[[], Sequence[T]]) -> Sequence[T] | None:
        """Return the result of a check; None if it fails, or has failed before."""
        if name in self._failed:
            return None
        try:
            return check()
        except Exception as error:  # noqa: BLE001 - a defect of one check must not end the others
            frame = extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            self._failed[name] = f"{name} is no longer checked: {type(error).__name__}: {error} ({where})"
            return None

    def _failures(self, now: float) -> list[Finding]:
        """Return a finding for each check that has failed since the last call."""
        new = list(filter(None, self._failed.values()))
        self._failed = dict.fromkeys(self._failed, "")
        return [Finding(time=now, kind="not_diagnosed", severity="info", message=message) for message in new]

    def _new_rows(self, state: RunState) -> list[StepRow]:
        """Read the new events; return the rows that they add."""
        timeline = self._timeline
        before = timeline.rows[-1] if timeline.rows else None
        timeline.follow(state)
        added = list(takewhile(lambda row: row is not before, reversed(timeline.rows)))[::-1]
        if any(kind == "straggler" for kind, _ in self._raised):
            for row in added:
                row.straggling = True
        return added

    def _checks(
        self, state: RunState, now: float, added: Sequence[StepRow] | None
    ) -> Mapping[str, Callable[[], Sequence[Symptom]]]:
        """Return the checks by the kind of their findings; ``added``: new rows, None where there are none any more."""
        checks: dict[str, Callable[[], Sequence[Symptom]]] = {
            "cpu_contention": lambda: self._contention.symptoms(state),
            "gpu_throttled": lambda: self._gpu_throttling.symptoms(state),
            "non_finite": lambda: self._non_finite.symptoms(state, now),
            "slow_evaluation": lambda: self._evaluations.symptoms(state),
            "memory_creep": lambda: self._memory.symptoms(state),
            "outside_torch": lambda: outside_torch(state, self._timeline),
            "desync": lambda: [] if _ranks_reported_desync(state) else desync(state),
            "stalled": lambda: stalls(state, self._activity, now, timeout_s=self.stall_timeout_s),
        }
        if added is None:
            return checks
        before = self._samples
        self._samples = {node: each if each.ranks else before.get(node, each) for node, each in state.nodes.items()}
        timeline, throttled = self._timeline, throttled_ranks(self._samples.values())
        crowded = self._crowded_ranks(state)
        held = throttled | crowded
        known = {rank for kind, rank in self._raised if kind == "straggler" and rank is not None}
        return {
            "uneven_speeds": lambda: self._uneven_speeds.symptoms(state, timeline, added, excluded=held | known),
            "straggler": lambda: stragglers(
                state,
                timeline,
                uneven=("imbalance", None) in self._raised,
                known=known,
                throttled=throttled,
                crowded=crowded,
                slowness=self._uneven_speeds.slowness,
            ),
            "imbalance": lambda: self._imbalance.symptoms(timeline, added, throttled=bool(held)),
            "input_bound": lambda: bounds(state, timeline, throttled=bool(held)),
            "periodic_delay": lambda: self._delays.symptoms(state, timeline, added),
            "loss_spike": lambda: loss_spikes(state, timeline),
            **checks,
        }

    def _crowded_ranks(self, state: RunState) -> frozenset[int]:
        """Return the ranks that share too few cores, of which each is late in its turn.

        They are those of a host that is found to have too few for them, or CPU ranks that are by far more than cores.
        """
        found = [finding for (kind, _), (finding, _) in self._raised.items() if kind == "cpu_contention"]
        hosts = {each.host for each in found if each.evidence.get("ranks", 0) > each.evidence.get("cores", math.inf)}
        crowded = set()
        for node in self._samples.values():
            ranks = [each.rank for each in node.ranks if each.rank in state.ranks]
            on_cpu = [rank for rank in ranks if state.ranks[rank].device == "cpu"]
            if node.host in hosts or len(on_cpu) >= CROWDED_RATIO * (node.cores or math.inf):
                crowded.update(ranks)
        return frozenset(crowded)

    def _is_new(self, key: Key, symptom: Symptom) -> bool:
        """Whether a symptom is not raised yet, or without the cause that is known now, or as a much smaller one.

        Ranks that wait for cores may do so for another cause than before: a quota that is set, or lifted. Which
        collectives stalled ranks have called may come later than the stall, and the record of a rank in which the
        first NaN stands, too, later than that of the others.
        """
        if key not in self._raised:
            return True
        raised = self._raised[key][0]
        if symptom.kind == "non_finite" and symptom.step == raised.step and len(symptom.ranks) > len(raised.ranks):
            return True
        cause = raised.cause
        named = symptom.cause in ("cpu_quota", "collectives") or symptom.kind == "cpu_contention"
        other = cause == "unattributed" or named
        if other and symptom.cause != cause:
            return True
        raised_ms = raised.evidence.get("excess_ms", math.inf)
        return symptom.evidence.get("excess_ms", 0.0) >= GROWN_RATIO * raised_ms

    def _clear(self, present: dict[Key, Symptom], state: RunState, now: float) -> list[Finding]:
        events = []
        failed = any(view.state == "failed" for view in state.ranks.values())
        for key, (finding, below) in list(self._raised.items()):
            if finding.kind == "stalled" and failed:
                continue  # others gave up waiting; the stalled rank is stalled still
            symptom = present.get(key)
            if symptom is not None and symptom.value >= (below or CLEAR_SHARE * symptom.threshold):
                continue
            del self._raised[key]
            cleared = replace(finding, time=now, state="cleared", step=state.step, line="", evidence={}, advice="")
            events.append(cleared)
        return events


def _ranks_reported_desync(state: RunState) -> bool:
    """Whether the ranks themselves have raised a desync finding, which has more detail."""
    return any(finding.kind == "desync" and not finding.diagnosed for finding in state.findings.values())
