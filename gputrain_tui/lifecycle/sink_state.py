"""Position of a live sink in the record of a run."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_json


class SinkState(msgspec.Struct, kw_only=True):
    """Contents of ``report-tensorboard.json`` and ``report-wandb.json``; replaced atomically by the sink."""

    target: str
    """TensorBoard folder or wandb project."""
    written: dict[str, int] = {}
    """Number of written values, by stream."""
    sizes: dict[str, int] = {}
    """Bytes of the TensorBoard event file with these values, by folder."""
    finished: bool = False
    """Whether the record is written to its end, ``run_ended`` included."""


_state = msgspec.json.Decoder(SinkState)


def read_sink_state(run_dir: RunDir, name: str) -> SinkState | None:
    """Read the state of a sink; None if it has written nothing."""
    try:
        return read_json(run_dir.report_state(name), _state)
    except RecordError:
        return None
