"""Report of a compilation before the first step: a script may train without a call that is seen until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer.contract.record import Doing, EventWriter
from trainer.host.user_code import innermost_line
from trainer.telemetry.stack_position import is_compiling

LONG_COMPILATION_S = 2.0
"""Minimum time of a compilation before it is reported, seconds: shorter ones come with each new shape."""


class CompilationReport:
    """Records once that torch.compile is at work.

    Args:
        writer: Writer of the events, whose thread makes the report.
        rank: Rank in the event.
        is_on: Return whether the script is still measured.
    """

    def __init__(self, writer: EventWriter, rank: int, is_on: Callable[[], bool]) -> None:
        self._writer = writer
        self._rank = rank
        self._is_on = is_on
        self._since: float | None = None
        """Time since which it is at work, monotonic seconds."""
        self._reported = False

    def check(self, _last: bool) -> None:
        """Look for a compilation; called before each write, until the first step begins."""
        if self._reported or not self._is_on() or not is_compiling():
            self._since = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        if waited_s < LONG_COMPILATION_S:
            return
        self._reported = True
        self._writer.write(
            Doing(
                time=time.time(),
                rank=self._rank,
                step=1,
                part="compile",
                parts_done=0,
                waited_ms=round(waited_s * 1e3, 1),
                line=innermost_line(threading.main_thread().ident or 0),
            )
        )
