"""Waits of the training thread in one phase of its step, which are recorded while they last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from trainer.contract.record import Doing, EventWriter
from trainer.distributed import flight_recorder
from trainer.host.user_code import frames_of, innermost_line
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.collectives.readings import Call
from trainer.telemetry.comm_hook import BucketHook
from trainer.telemetry.step_events import Phase
from trainer.telemetry.torch_compile import LONG_COMPILATION_S, is_compiling

NEXT_PHASE: dict[Phase | None, str] = {
    None: "data",
    "data": "h2d",
    "h2d": "forward",
    "forward": "backward",
    "backward": "optimizer",
    "optimizer": "other",
    "other": "data",
    "excluded": "forward",
}
"""Phase after each phase, in a loop whose laps follow each other without a gap; None is the start of a step."""


class LongWait:
    """Check for a phase without an end; the writer's thread calls it."""

    def __init__(
        self,
        writer: EventWriter,
        *,
        rank: int,
        hooks: Sequence[BucketHook],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.collectives: CollectiveMeter | None = None
        """Of the script, if they are followed."""
        self._writer, self._rank, self._hooks = writer, rank, hooks
        self._now, self._clock = now, clock
        self._progress = (0, 0)
        """Complete steps, and phases of the next one, at the last check."""
        self._progress_s = clock()
        self._blocked: tuple[Call | None, float] = None, 0.0
        """Collective of the script that the training thread was seen in, and since when."""
        self._reported_part: str | None = None
        """Part that was reported as long since then."""

    def check(
        self, progress: tuple[int, int], step: int, part: Any, *, paused: bool, longest_s: float, thread: int
    ) -> None:
        """Record the phase of a step without progress.

        Args:
            progress: complete steps, and phases of the next one.
            step: the one in progress.
            part: where the training thread is after the last of these phases, as ``Doing`` names it.
            paused: whether no step is in progress.
            longest_s: duration of the longest recent step.
            thread: the training thread.
        """
        now = self._clock()
        if paused or progress != self._progress:
            self._progress, self._progress_s, self._reported_part = progress, now, None
        blocked_in, blocked_s = self._blocked_in(now)
        waited_s = now - self._progress_s
        long_phase_s = 5.0  # minimum time of a phase before it is reported as long, seconds
        if waited_s < long_phase_s and (waited_s < LONG_COMPILATION_S or not is_compiling()):
            return
        # Seen within a second of its start: one that a rank is in for a moment is not why its phase is long.
        if blocked_s >= long_phase_s - 1.0:
            part, waited_s = "sync", max(blocked_s, long_phase_s)
        elif part == "backward" and any(hook.waiting for hook in self._hooks):
            part = "sync"
        elif is_compiling():
            part = "compile"
        elif running := threads_after_end(thread):
            part, thread = "threads", running[0]
        # Minimum time of a phase before it is reported as long, in multiples of the longest recent step; a
        # compilation is reported sooner, since the longest step may have been another one.
        long_phase_steps = 4.0
        if part == self._reported_part or (part != "compile" and waited_s < long_phase_steps * longest_s):
            return
        self._reported_part = part
        self._writer.write(
            Doing(
                time=self._now(),
                rank=self._rank,
                step=step,
                part=part,
                parts_done=progress[1] + (part == "sync"),
                waited_ms=round(waited_s * 1e3, 1),
                collectives=flight_recorder.dump(),
                waits_in=blocked_in if part == "sync" else "",
                line=innermost_line(thread),
            )
        )

    def _blocked_in(self, now: float) -> tuple[str, float]:
        """Return the collective that the training thread is in, and for how many seconds it has been seen there."""
        call = None if self.collectives is None else self.collectives.blocked
        if call is None or call is not self._blocked[0]:
            self._blocked = call, now
        if call is None or self.collectives is None:
            return "", 0.0
        return self.collectives.described(call), now - self._blocked[1]


def threads_after_end(thread: int) -> list[int]:
    """Return the threads that keep this process although the code of its main thread has ended.

    Empty where that code goes on, or ``thread`` is not the main thread.
    """
    interpreter: Any = threading
    ended = interpreter._shutdown.__code__
    if all(frame.f_code is not ended for frame in frames_of(thread)):
        return []
    return [each.ident for each in threading.enumerate() if not each.daemon and each.ident not in (thread, None)]
