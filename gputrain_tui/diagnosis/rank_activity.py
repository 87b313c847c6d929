"""When each rank last made progress, was active and began to wait, by the clock of the process that follows the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.collective_waits import waits
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.standstill import RecordWatch


@dataclass
class RankActivity:
    """Times of each rank's last progress and activity, by this process's clock: the nodes' clocks may differ."""

    progress: dict[int, tuple[int, str, int, int]] = field(default_factory=dict)
    """By rank, how often it was started, its stage, step and number of begins and ends of validations."""
    progressed_at: dict[int, float] = field(default_factory=dict)
    """By rank, when it last ended a step or entered another stage."""
    active_at: dict[int, float] = field(default_factory=dict)
    """By rank, when it last made progress or its process was active."""
    waiting_since: dict[int, float] = field(default_factory=dict)
    """By rank that waits for others within a step, when its wait began."""
    longest_idle_s: float = 0.0
    """Longest idle time of a process that became active again."""
    record: RecordWatch = field(default_factory=RecordWatch)
    _samples: dict[int, tuple[Any, object]] = field(default_factory=dict)
    """By rank, its newest sample and that of its GPU."""

    def update(self, state: RunState, now: float) -> None:
        for rank, view in state.ranks.items():
            progress = (view.starts, view.stage, view.step, view.validation_turns)
            before = self.progress.get(rank)
            if before != progress:
                self.progress[rank], self.progressed_at[rank] = progress, now
            if view.doing is None or not waits(view):
                self.waiting_since.pop(rank, None)
            elif rank not in self.waiting_since:
                self.waiting_since[rank] = now - view.doing.waited_ms / 1e3
            process, gpu = self._samples.get(rank, (None, None))
            is_sampled = view.process is not process or view.gpu is not gpu
            if before != progress or (is_sampled and (_is_active(view) or _log_grows(process, view))):
                self.longest_idle_s = max(self.longest_idle_s, now - self.active_at.get(rank, now))
                self.active_at[rank] = now
            if is_sampled:
                self._samples[rank] = view.process, view.gpu
        self.record.note(state, now)

    def silence_s(self, view: RankView, now: float, *, since: float) -> float:
        """Return the time without progress of a rank, from ``since`` on, as far as its record is known to be whole.

        On a full disk neither steps nor samples are recorded. Before a rank's first step, which comes after imports and
        data of unlike length, the time counts from when others began to wait for it, once they do.
        """
        begun = max(self.progressed_at.get(view.rank, now), since)
        if view.stage == "first_step" and view.rank not in self.waiting_since:
            begun = max(begun, min(self.waiting_since.values(), default=begun))
        return max(0.0, self.record.whole_until(view.node, now) - begun)

    def works(self, view: RankView, now: float) -> bool:
        """Whether a rank has shown activity lately: its processes, its GPU or its log."""
        return now - self.active_at.get(view.rank, now) < limit.WORKING_S


def busy_or_idle(view: RankView) -> str | None:
    """Return ``busy`` or ``idle`` by the last sample of a rank's process and its descendants; None without one.

    A runnable process without a core is busy; so is one whose descendants compute, however few cores are left to them.
    """
    process = view.process
    if process is None or process.cpu_percent is None:
        return None
    used = process.cpu_percent + (process.wait_percent or 0.0) + (process.children_percent or 0.0)
    return "busy" if used >= limit.BUSY_PERCENT or (process.children_percent or 0.0) >= limit.ACTIVE_PERCENT else "idle"


def _log_grows(before: Any, view: RankView) -> bool:
    earlier, later = getattr(before, "log_bytes", None), getattr(view.process, "log_bytes", None)
    return earlier is not None and later is not None and later > earlier


def _is_active(view: RankView) -> bool:
    """Whether the last sample of a rank's process or GPU shows any activity."""
    if busy_or_idle(view) == "busy":
        return True
    # Waits for a core do not count: where cores are scarce, even a thread that only polls now and then has some.
    process = view.process
    used = 0.0 if process is None else (process.cpu_percent or 0.0) + (process.children_percent or 0.0)
    if view.gpu is not None:
        used = max(used, view.gpu.utilization_percent or 0.0)
    return used >= limit.ACTIVE_PERCENT
