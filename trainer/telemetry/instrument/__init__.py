"""Measurement of an unchanged training script.

The parts of a step are observed in torch's functions: the forward pass of DistributedDataParallel,
``torch.autograd.backward``, the optimizers' step, the DataLoader's iterator. They are wrapped once the script itself
has imported torch: it may set environment variables before that, and a script without torch does not import it.
Nothing is stored in models, optimizers and loaders.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.agent import own_package, script
from trainer.agent.assignment import RankAssignment
from trainer.contract.outcome import RankReport
from trainer.contract.record import RunDir
from trainer.telemetry.instrument import started_process, tracker_clients
from trainer.telemetry.instrument.started_process import after_import

if TYPE_CHECKING:
    from trainer.telemetry.collectives.collective_meter import CollectiveMeter
    from trainer.telemetry.instrument.recording import Recording

EXIT_S = 1.0
"""Maximum time that ``os._exit`` waits for the last steps to be written."""

_recording: Recording | None = None
"""Recording of this process; None before the script has imported torch."""
_watched: CollectiveMeter | None = None
"""Meter of a process without a recording."""


def run_script(assignment: RankAssignment) -> int:
    """Run the script of a rank, measured, and return the exit code for ``os._exit``."""
    assert assignment.run_dir is not None
    install(
        RunDir(assignment.run_dir).rank_events(assignment.rank),
        assignment.rank,
        on_begin=lambda: assignment.report(RankReport(trains=True)),
    )
    before_os_exit(lambda status: finish(failed=status != 0), EXIT_S)
    return script.run_script(
        assignment, at_start=lambda: _follow_started(assignment), at_end=finish, hidden=str(Path(__file__).parents[1])
    )


def install(path: Path, rank: int, *, on_begin: Callable[[], None] = lambda: None) -> None:
    """Start to measure as soon as torch has been imported; ``on_begin`` is called when the script begins to train."""

    def begin() -> None:
        global _recording
        try:
            with own_package.own_package():
                from trainer.agent.deferred_compiler import defer_compiler
                from trainer.telemetry.collectives import interception
                from trainer.telemetry.instrument import patches

            defer_compiler()
            recording = _recording = patches.patch(path, rank)
            recording.on_begin = on_begin
            functional = interception.FUNCTIONAL_MODULE
            after_import(functional, lambda: interception.wrap_functional(recording.collectives))
            after_import("torch._inductor.compile_fx", _recording.await_compiler)
            for module, patch in patches.patch_later(_recording).items():
                after_import(module, patch)
        except Exception as error:  # noqa: BLE001 - a script must train with an unknown version of torch too
            print(f"gputrain: not measured: {type(error).__name__}: {error}", file=sys.stderr)

    after_import("torch", begin)
    tracker_clients.mirror()


def _follow_started(assignment: RankAssignment) -> None:
    """Make processes that the script starts ask the node agent for a rank when they join a process group."""
    if not assignment.started_ranks_socket:
        return
    pid = os.getpid()

    def own_group(rank: int, world_size: int) -> bool:
        if os.getpid() != pid:
            return False
        assignment.report(RankReport(group=(rank, world_size)))
        return True

    # A launched rank among others has no processes that train, unless by mistake.
    is_alone = assignment.local_world_size == 1 or assignment.must_start_ranks
    started_process.follow(
        assignment.started_ranks_socket,
        own_package,
        starts_ranks=assignment.must_start_ranks,
        is_visible=is_alone,
        own_group=own_group,
    )


def finish(failed: bool = False) -> str:
    """Write the last steps and stop measuring; return why the end of the record is not on disk, empty if it is."""
    return "" if _recording is None else _recording.close(failed=failed)


def hand_over() -> int:
    """Stop measuring because ``trainer.watch`` takes over; return the number of steps measured."""
    if _recording is None:
        return 0
    _recording.close(handed_over=True)
    return _recording.steps


def collective_meter() -> CollectiveMeter:
    """Return the meter of this process's collectives for ``trainer.watch``, which may run without this measurement."""
    global _watched
    if _recording is not None:
        return _recording.collectives
    if _watched is None:
        with own_package.own_package():
            from trainer.telemetry.collectives import interception
            from trainer.telemetry.collectives.collective_meter import CollectiveMeter

        meter = _watched = CollectiveMeter()
        interception.wrap_calls(meter)
        after_import(interception.FUNCTIONAL_MODULE, lambda: interception.wrap_functional(meter))
    return _watched


def before_os_exit(act: Callable[[int], object], within_s: float) -> None:
    """Patch ``os._exit`` to call ``act`` with the status first, in this process only, for at most ``within_s``.

    Scripts use it to leave a hanging group.
    """
    leave, pid = os._exit, os.getpid()

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        if os.getpid() == pid:
            # In a thread: a signal handler may have interrupted code that holds the record's lock.
            with contextlib.suppress(RuntimeError):
                thread = threading.Thread(target=act, args=(status,), daemon=True)
                thread.start()
                thread.join(within_s)
        leave(status)

    os._exit = _exit  # type: ignore[assignment]
