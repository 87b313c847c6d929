"""What is known of a run whose end is not recorded: whether its nodes go on, what ends them, why it cannot be."""

from __future__ import annotations

import errno
import os

import msgspec

from gputrain_tui.history.status_file import Status, state_of
from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_regular, read_json
from trainer.host.process_identity import ProcessIdentity, is_alive


class _Attempt(msgspec.Struct):
    """The part of ``attempt.json`` that names the processes of the nodes."""

    processes: dict[str, ProcessIdentity]


_decode = msgspec.json.Decoder(_Attempt)


def write_error(run_dir: RunDir) -> str:
    """Return why the record of a run cannot be written, as on a read-only file system; empty where it can, or is gone.

    The lock is tried, which whoever takes the run over must open, and the folder, in which files are replaced.
    """
    try:
        os.close(open_regular(run_dir.lock, os.O_WRONLY))
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(run_dir.path, os.W_OK) else os.strerror(errno.EACCES)


def lost_text(run_dir: RunDir, status: Status) -> str:
    """Return what is known of the nodes of a lost run and what ends them; empty for any other run."""
    if state_of(status) != "lost" or status.archived is not None:
        return ""
    try:
        nodes = [is_alive(process) for process in read_json(run_dir.attempt, _decode).processes.values()]
    except RecordError:
        nodes = []
    ranks = (
        "but its ranks train on" if True in nodes else "its ranks may train on" if None in nodes else "with its ranks"
    )
    if error := write_error(run_dir):
        return f"its supervisor has ended, {ranks}; its record cannot be written: {error}"
    return f"its supervisor was killed, {ranks}: `gputrain stop {run_dir.path.name}` takes it over and ends it"
