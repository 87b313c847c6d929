"""How far a live sink has written the record of a run."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_json


class SinkState(msgspec.Struct, kw_only=True):
    """Contents of ``report-tensorboard.json`` and ``report-wandb.json``; replaced atomically by the sink."""

    target: str
    """Folder or project."""
    written: dict[str, int] = {}
    """By stream, how many of its values are written."""
    sizes: dict[str, int] = {}
    """By folder, how many bytes of its event file hold these values."""
    finished: bool = False
    """Whether the whole record is written, with the end of the run."""


_state = msgspec.json.Decoder(SinkState)


def read_sink_state(run_dir: RunDir, name: str) -> SinkState | None:
    """Read how far a sink is; None where it has written nothing."""
    try:
        return read_json(run_dir.report_state(name), _state)
    except RecordError:
        return None
