"""Process that writes the record of a run to TensorBoard or wandb while the run goes on.

``python -m gputrain_tui.lifecycle.sink_program RUN_DIR tensorboard|wandb TARGET``. It follows the record until standard
input is closed, then writes the rest and exits. A later process continues at the recorded position.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from gputrain_tui.history.export.live_scalars import LiveScalars, Sink
from gputrain_tui.history.export.live_sinks import TensorBoardSink, WandbSink
from gputrain_tui.history.plan_file import planned_world_size
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle.sink_state import SinkState, read_sink_state
from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import open_to_append
from trainer.host.descendants import adopt_orphans

POLL_S = 1.0
"""Time between two reads of the record."""
NICENESS = 10
"""Lower priority than the ranks, for machines with too few cores."""


def main() -> int:
    """Write the record of a run to a sink until standard input is closed; return the exit code."""
    run_dir, name, target = RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
    os.nice(NICENESS)
    adopt_orphans()  # wandb's processes stay descendants of this one, with which they are killed
    path = run_dir.report_state(name)
    lock = open_to_append(path.with_suffix(".lock"))
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the sink of a previous supervisor to end
    state = read_sink_state(run_dir, name) or SinkState(target=_absolute(run_dir, name, target))
    if state.finished:
        return 0
    status = read_status(run_dir)
    if status is None:
        raise RecordError(f"{run_dir.status} cannot be read")
    world_size = planned_world_size(run_dir)
    sink: Sink
    if name == "tensorboard":
        sink = TensorBoardSink(run_dir, world_size, Path(state.target), began=status.started, sizes=state.sizes)
    else:
        logged = sum(state.written.get(stream, 0) for stream in ("over_ranks", "validations"))
        sink = WandbSink(run_dir, world_size, state.target, logged=logged)
    scalars = LiveScalars(run_dir, world_size, sink, written=state.written)

    def save() -> None:
        kept = {stream: max(count, state.written.get(stream, 0)) for stream, count in scalars.written.items()}
        write_atomically(path, msgspec.json.encode(msgspec.structs.replace(state, written=state.written | kept)))

    _follow(scalars, sink, save)
    if scalars.ended:
        scalars.finish()
        sink.commit(save)
    sink.finish()
    state.finished = scalars.ended
    save()
    return 0


def _absolute(run_dir: RunDir, name: str, target: str) -> str:
    """Return the absolute folder of a TensorBoard sink, independent of the working directory; else the target."""
    if name != "tensorboard":
        return target
    folder = run_dir.path / "tensorboard" if target == "true" else Path(target).expanduser() / run_dir.path.name
    return str(folder.absolute())


def _follow(scalars: LiveScalars, sink: Sink, save: Callable[[], None]) -> None:
    """Write appended events to the sink until standard input is closed and the record is read to its end."""
    supervisor = select.poll()
    supervisor.register(0, select.POLLIN)
    while True:
        is_alone = bool(supervisor.poll(0))  # checked before reading, so that all events before the end are read
        found = scalars.poll()
        if found:
            sink.commit(save)
        elif is_alone:
            return
        else:
            supervisor.poll(POLL_S * 1e3)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:  # noqa: BLE001 - the supervisor reports the last line of the log
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # wandb's exit handlers may hang
