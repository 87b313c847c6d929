"""Measure a training script of which no line was changed.

The rank's process is ours, so what a step consists of can be seen where torch does it: the forward pass of
DistributedDataParallel, ``torch.autograd.backward``, the optimizers' step, the DataLoader's iterator. Wrappers are put
around those once the script itself has imported torch: it may set environment variables before that, and a script
without torch stays without. Models, optimizers and loaders hold nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.agent import script
from trainer.agent.assignment import RankAssignment
from trainer.agent.own_package import own_package
from trainer.contract.record import RunDir
from trainer.telemetry.instrument.import_hook import after_import

if TYPE_CHECKING:
    from trainer.telemetry.instrument.recording import Recording

EXIT_S = 1.0
"""Time that a script which ends its process by ``os._exit`` waits for its last steps to be written, at most."""

_recording: Recording | None = None
"""Of this process; None before the script has imported torch."""


def run_script(assignment: RankAssignment) -> int:
    """Run the script of a rank, measured, and return the exit code for ``os._exit``."""
    assert assignment.run_dir is not None
    install(RunDir(assignment.run_dir).rank_events(assignment.rank), assignment.rank)
    return script.run_script(assignment, at_end=finish, hidden=str(Path(__file__).parents[1]))


def install(path: Path, rank: int) -> None:
    """Measure from the moment on in which torch has been imported.

    Args:
        path: The event file.
        rank: Rank in the events.
    """

    def begin() -> None:
        global _recording
        try:
            with own_package():
                from trainer.telemetry.instrument import patches

            _recording = patches.patch(path, rank)
        except Exception as error:  # noqa: BLE001 - a script must train with a torch that this does not know, too
            print(f"gputrain: not measured: {type(error).__name__}: {error}", file=sys.stderr)

    after_import("torch", begin)
    _finish_before_exit()


def finish() -> None:
    """Write what was measured, and measure nothing from here on."""
    if _recording is not None:
        _recording.close()


def hand_over() -> int:
    """Measure nothing from here on, because somebody else does; return the steps so far."""
    if _recording is None:
        return 0
    _recording.close(told=True)
    return _recording.steps


def _finish_before_exit() -> None:
    """Have ``os._exit`` finish first, in this process only: scripts use it to leave a group that hangs."""
    leave, pid = os._exit, os.getpid()

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        if os.getpid() == pid and _recording is not None:
            # In a thread: a signal's handler may have interrupted what holds the record's lock.
            with contextlib.suppress(RuntimeError):
                thread = threading.Thread(target=finish, daemon=True)
                thread.start()
                thread.join(EXIT_S)
        leave(status)

    os._exit = _exit  # type: ignore[assignment]
