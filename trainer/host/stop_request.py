"""Stop request of a process, made from signals and the end of a lease.

Used by the command, the supervisor, the node agent, the in-process agent and the rank.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from trainer.contract.stop_level import StopLevel

LEASE = "GPUTRAIN_LEASE"
"""Environment variable: ``stdin`` means that the end of standard input ends the run."""
LEASE_RETURNED = b"stop\n"
"""Line that the holder of a lease writes before ending it on purpose, to distinguish that from a broken connection."""
LEASE_LOST = "lost contact with the command that started it"
"""Reason of a stop at the end of a lease without ``LEASE_RETURNED``."""
STACK_SIGNAL = signal.SIGQUIT
"""Signal on which a rank prints its Python stacks; SIGUSR1 and SIGUSR2 are sent by schedulers before a time limit."""
SAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request to save and exit: from a person, a terminal, a scheduler, and ``sbatch --signal``."""
STOP_CODES = frozenset({*(-number for number in SAVE_SIGNALS), *(128 + number for number in SAVE_SIGNALS)})
"""Exit codes of a process that such a signal has ended, and of one that has handled it as a shell does."""
OWN_SIGNAL_S = 1.0
"""Time in which a signal that has ended a rank reaches its node agent too, if it was sent to the whole node."""
NOW_SIGNAL = signal.SIGRTMIN
"""Signal that requests a supervisor or a node agent to exit without saving, and ends a rank that would save on SIGTERM.
A person or a scheduler sends it for nothing else."""
STOP_COMMAND_SIGNAL, CONSOLE_SIGNAL, STARTER_SIGNAL = (signal.SIGRTMIN + number for number in (1, 2, 3))
"""Signals that request a supervisor to save and exit, and name the origin of the request."""
STOP_REASONS = {
    STOP_COMMAND_SIGNAL: "stopped by `gputrain stop`",
    CONSOLE_SIGNAL: "stopped in the console",
    STARTER_SIGNAL: "stopped by the command that started it",
}
"""Reason of the stop by the signal that names the origin of the request."""
STOP_SIGNALS = (*SAVE_SIGNALS, NOW_SIGNAL, *STOP_REASONS)
"""Signals that the starter of a supervisor blocks: they stay pending until the supervisor has its handlers."""


@contextmanager
def signals_blocked(signals: Collection[int]) -> Iterator[None]:
    """Block signals while the body runs: they stay pending, also in a process that is started in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequested(BaseException):
    """A stop request interrupted a blocking call; a BaseException, so that no ``except Exception`` swallows it."""


def signal_of(level: StopLevel) -> signal.Signals:
    """Return the signal that requests a stop of this level from another process."""
    return signal.SIGTERM if level <= StopLevel.SAVE else NOW_SIGNAL


class StopRequest:
    """Stop request of this process, from signals and the lease; its descriptor is readable after each signal."""

    def __init__(
        self,
        signals: Collection[int] = STOP_SIGNALS,
        *,
        lease: bool = False,
        saves_without_lease: bool = False,
        main_thread_is_free: bool = True,
    ) -> None:
        """Start without a request; signals are caught from ``catch`` or ``with`` on.

        Args:
            signals: signals that request a stop.
            lease: whether the end of standard input requests an exit, without saving.
            saves_without_lease: whether it requests to save first, unless the holder has ended the lease on purpose.
            main_thread_is_free: whether the main thread runs signal handlers in time; if it may be in C++ for long,
                another thread receives the signals in ``wait``.
        """
        self.level = StopLevel.NONE
        self.reason: str | None = None
        """Reason of the first request."""
        self.requested_at: float | None = None
        """Time of the first request, Unix seconds."""
        self._signals = signals
        self._lease = lease
        self._saves_without_lease = saves_without_lease
        self._main_thread_is_free = main_thread_is_free
        self._reported = StopLevel.NONE
        """The level that ``risen`` returned last."""
        self._interrupted = False
        """Whether SIGINT came before."""
        self._raising = False
        self._released = False
        self._unsent: list[int] = []
        """Signals that have not been forwarded yet."""
        self._forward_to: int | None = None
        """Pidfd of the process that gets the signals too."""
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._read = self._write = -1

    def catch(self) -> None:
        """Install the handlers and follow the lease; on the main thread."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            # Signals of a terminal stay ignored under `nohup` and `&` in a script. The others are sent to this process
            # in particular.
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if not ignored or number not in (signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        # Children have another standard input.
        os.environ.pop(LEASE, None)
        if self._lease:
            threading.Thread(target=self._follow_lease, name="lease", daemon=True).start()

    def __enter__(self) -> StopRequest:
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self._released = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        self._read = -1

    def ask(self, level: StopLevel, reason: str) -> None:
        """Request a stop; a lower level than before changes nothing."""
        self.level = max(level, self.level)
        self.reason = self.reason or reason
        self.requested_at = self.requested_at or time.time()

    def risen(self) -> StopLevel:
        """Return the level if it has risen since the last call, else NONE."""
        level, before = self.level, self._reported
        self._reported = level
        return level if level > before else StopLevel.NONE

    def fileno(self) -> int:
        """Return the descriptor that a signal makes readable until ``drain``."""
        return self._read

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal or the time-out."""
        select.select([self], [], [], timeout_s)
        self.drain()

    def await_request(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested or the time-out; return whether it is requested."""
        end = time.monotonic() + timeout_s
        while not self.level and (left_s := end - time.monotonic()) > 0:
            self.wait(left_s)
        return bool(self.level)

    def drain(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        with suppress(BlockingIOError):
            for number in os.read(self._read, 4096):
                if not self._main_thread_is_free and number in self._signals:
                    self._receive(number)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopRequested in the body at a request, also at an earlier one; for calls that block."""
        self._raising = True
        try:
            if self.level:
                raise StopRequested
            yield
        finally:
            self._raising = False

    @contextmanager
    def forwarded_to(self, pidfd: int) -> Iterator[None]:
        """Forward signals to a process while the body runs, also those that came before."""
        self._forward_to = pidfd
        self._forward()
        try:
            yield
        finally:
            self._forward_to = None

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._main_thread_is_free:
            self._receive(number)
        if self._raising:
            self._raising = False
            raise StopRequested

    def _receive(self, number: int) -> None:
        # Only a second Ctrl-C means a person for whom saving takes too long. A closed terminal sends SIGHUP more than
        # once, from its kernel and its shell; a second `gputrain stop` or a scheduler's signal means the same stop.
        again = self._interrupted and number == signal.SIGINT
        self._interrupted |= number == signal.SIGINT
        level = StopLevel.KILL if again else StopLevel.NOW if number == NOW_SIGNAL else StopLevel.SAVE
        self.ask(level, STOP_REASONS.get(number) or f"stopped by {signal.Signals(number).name}")
        self._unsent.append(number)
        self._forward()

    def _forward(self) -> None:
        # From the handler, because the main thread may be blocked by output whose reader has stalled.
        while self._forward_to is not None and self._unsent:
            with suppress(ProcessLookupError, IndexError):  # a handler that came in between has sent it
                signal.pidfd_send_signal(self._forward_to, self._unsent.pop(0))
                signal.pidfd_send_signal(self._forward_to, signal.SIGCONT)  # a stopped process runs no handler

    def _follow_lease(self) -> None:
        returned = False
        while os.read(0, 4096):
            returned = True
        if not self._released:
            self.reason = self.reason or (STOP_REASONS[STARTER_SIGNAL] if returned else LEASE_LOST)
            saves = self._saves_without_lease and not returned
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM if saves else NOW_SIGNAL)
