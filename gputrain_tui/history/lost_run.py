"""What is known of a run whose supervisor was killed: whether its nodes go on, and what ends them."""

from __future__ import annotations

import msgspec

from gputrain_tui.history.status_file import Status, state_of
from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_json
from trainer.host.process_identity import ProcessIdentity, is_alive


class _Attempt(msgspec.Struct):
    """The part of ``attempt.json`` that names the processes of the nodes."""

    processes: dict[str, ProcessIdentity]


_decode = msgspec.json.Decoder(_Attempt)


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
    return f"its supervisor was killed, {ranks}: `gputrain stop {run_dir.path.name}` takes it over and ends it"
