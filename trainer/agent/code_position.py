"""Where a rank's code is: the line at which its main thread stays, and on request the stacks of all threads.

A thread of the rank reports both to the node agent, also before any step and without torch. The agent puts the line
into its samples, from which a stall gets it, and the stacks into the record.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from trainer.agent.assignment import STOP
from trainer.contract.outcome import RankReport
from trainer.contract.record import CodeFrame, Collective, ThreadStack
from trainer.contract.record.regular_file import OwnedDescriptor
from trainer.host.stop_request import STACK_SIGNAL
from trainer.host.user_code import frames_of, innermost_line, is_user_code, shown_file

PERIOD_S = 3.0
"""Time between two checks; a report says that two in a row found the same line, and comes again while it is so."""
MAX_FRAMES = 100
"""Most calls of a thread that are reported; a deeper stack loses its outermost ones."""
MAX_THREADS = 32
"""Most threads that are reported."""
collectives: Callable[[], list[Collective]] = list
"""Returns the last collectives of this process; set where torch is loaded, which this module never imports."""


class CodePosition:
    """The line of a rank by its last report, on the agent's side."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._line, self._time = "", 0.0

    def set(self, line: str) -> None:
        """Take a report."""
        self._line, self._time = line, self._now()

    @property
    def line(self) -> str:
        """The line; empty if the rank has moved on, or reports no more, as in code that holds the interpreter."""
        return self._line if self._now() - self._time < 2.5 * PERIOD_S else ""


def report_position(
    report: Callable[[RankReport], None], requests: Connection | None = None, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Report from a thread where the main thread stays, with an empty line once it has moved on, and answer requests.

    Args:
        report: called on the thread.
        requests: a message in it asks for the stacks of all threads, if it is no stop request.
        on_stop: called on the thread at a stop request.
    """
    is_user_code("")  # finds the folders of libraries before a script may hide their modules
    main = threading.main_thread().ident
    assert main is not None
    threading.Thread(target=_watch, args=(report, requests, main, on_stop), name="position-watch", daemon=True).start()


def stacks(main: int) -> list[ThreadStack]:
    """Return the stacks of all threads but the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = sorted(sys._current_frames().keys() - {main, threading.get_ident()})
    found = []
    for thread in (main, *others[: MAX_THREADS - 1]):
        frames = [
            CodeFrame(shown_file(code.co_filename), frame.f_lineno or 0, code.co_name, is_user_code(code.co_filename))
            for frame, _ in zip(frames_of(thread), range(MAX_FRAMES), strict=False)
            for code in (frame.f_code,)
        ]
        found.append(ThreadStack(names.get(thread, f"thread {thread}"), without_start(frames)))
    return found


def without_start(frames: list[CodeFrame]) -> list[CodeFrame]:
    """Return the calls without those outside of the user's outermost one, which start the rank's process."""
    outermost = max((index for index, frame in enumerate(frames) if frame.user), default=len(frames))
    return frames[: outermost + 1]


def _watch(
    report: Callable[[RankReport], None], requests: Connection | None, main: int, on_stop: Callable[[], None]
) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # the script's threads get them, as without this
    descriptor = None if requests is None else OwnedDescriptor(requests.fileno())
    before = reported = ""
    handled = False
    while True:
        due = time.monotonic() + PERIOD_S
        while (left_s := due - time.monotonic()) > 0:
            if requests is None or descriptor is None or not descriptor.is_unchanged:
                time.sleep(left_s)
            elif (message := _message(requests, descriptor, left_s)) == STOP:
                on_stop()
            elif message:
                report(RankReport(stacks=stacks(main)))
                report(RankReport(collectives=collectives()))  # second: it takes a lock of torch
        # The printing of stacks on the signal is no handler of Python: only a script's own handler is one.
        if callable(signal.getsignal(STACK_SIGNAL)) != handled:
            handled = not handled
            report(RankReport(handles_stack_signal=handled))
        line = innermost_line(main)
        stays = line if line == before else ""
        if stays or reported:
            report(RankReport(line=stays))
        before, reported = line, stays


def _message(requests: Connection, descriptor: OwnedDescriptor, timeout_s: float) -> bytes:
    """Wait for a message of the node agent; return it, empty for none."""
    try:
        return requests.recv_bytes() if requests.poll(timeout_s) and descriptor.is_unchanged else b""
    except (EOFError, OSError):  # the agent is gone, or a script has closed the descriptor
        time.sleep(timeout_s)
        return b""
