"""Contents of ``slurm.json``: the Slurm job of a run."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir
from trainer.contract.record.events import Count
from trainer.contract.record.regular_file import read_json


class SlurmJob(msgspec.Struct, kw_only=True):
    """Contents of ``slurm.json``: the Slurm job of a run."""

    number: Count
    partition: str = ""
    nodes: list[str] = []
    """Its hosts in the order of the plan; empty before Slurm has chosen them."""
    batch: bool = False
    """Whether the run's supervisor is the job's script."""


_job = msgspec.json.Decoder(SlurmJob)


def read_job(run: RunDir) -> SlurmJob | None:
    """Read the Slurm job of a run; None where it has none."""
    try:
        return read_json(run.slurm, _job)
    except RecordError:
        return None
