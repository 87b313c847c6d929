"""Process that writes the record of a run to TensorBoard or wandb while the run goes on.

``python -m gputrain_tui.lifecycle.sink_program RUN_DIR tensorboard|wandb TARGET``. It follows the record until standard
input is closed, then writes the rest and exits. A later process begins again at the first step.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import traceback
from pathlib import Path

from gputrain_tui.history.export.live_scalars import LiveScalars, Sink, WandbSink
from gputrain_tui.history.export.tensorboard_folder import TensorBoardSink
from gputrain_tui.history.known_ranks import KnownRanks
from gputrain_tui.history.status_file import require_status
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append, read_whole
from trainer.host.descendants import adopt_orphans

POLL_S = 1.0
"""Time between two reads of the record."""


def main() -> int:
    """Write the record of a run to a sink until standard input is closed; return the exit code."""
    run_dir, name, target = RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
    os.nice(10)  # below the ranks, for machines with too few cores
    adopt_orphans()  # wandb's processes stay descendants of this one, with which they are killed
    lock = open_to_append(run_dir.report_lock(name))
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the sink of a previous supervisor to end
    world_size = KnownRanks(run_dir).count
    sink: Sink
    if name == "tensorboard":
        folder = _folder(run_dir, target, lock)
        sink = TensorBoardSink(run_dir, world_size, folder, began=require_status(run_dir).started)
    else:
        sink = WandbSink(run_dir, world_size, target)
    scalars = LiveScalars(run_dir, world_size, sink)
    _follow(scalars, sink)
    if scalars.ended:
        scalars.finish()
        sink.commit()
    sink.finish()
    return 0


def _folder(run_dir: RunDir, target: str, lock: int) -> Path:
    """Return the TensorBoard folder of a run; the lock keeps it for a later process with another working directory."""
    if first := os.fsdecode(read_whole(run_dir.report_lock("tensorboard"))):
        return Path(first)
    folder = run_dir.path / "tensorboard" if target == "true" else Path(target).expanduser() / run_dir.path.name
    os.write(lock, os.fsencode(folder.absolute()))
    return folder.absolute()


def _follow(scalars: LiveScalars, sink: Sink) -> None:
    """Write appended events to the sink until standard input is closed and the record is read to its end."""
    supervisor = select.poll()
    supervisor.register(0, select.POLLIN)
    while True:
        is_alone = bool(supervisor.poll(0))  # checked before reading, so that all events before the end are read
        if scalars.poll():
            sink.commit()
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
