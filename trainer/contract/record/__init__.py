"""Define the record of a run: event schema, event writer and the layout of the run directory.

Torch-free, because the console reads with the definitions with which the ranks write.
"""

from __future__ import annotations

from trainer.contract.record.checkpoints import checkpoint_to_resume, recorded_checkpoints
from trainer.contract.record.events import (
    MAX_RANKS,
    STATES,
    AnyEvent,
    Checkpoint,
    Checksum,
    Doing,
    Event,
    Failure,
    Finding,
    GpuSample,
    Joining,
    Lost,
    NodeSample,
    Queued,
    RankSample,
    RankState,
    RankStateName,
    RunEnded,
    RunStarted,
    RunStatusName,
    Sample,
    Step,
    TrainingPlan,
    Validation,
    decode_events,
    encode_event,
    single_steps,
)
from trainer.contract.record.run_dir import RunDir, write_atomically
from trainer.contract.record.writer import EventWriter

__all__ = [
    "MAX_RANKS",
    "STATES",
    "AnyEvent",
    "Checkpoint",
    "Checksum",
    "Doing",
    "Event",
    "EventWriter",
    "Failure",
    "Finding",
    "GpuSample",
    "Joining",
    "Lost",
    "NodeSample",
    "Queued",
    "RankSample",
    "RankState",
    "RankStateName",
    "RunDir",
    "RunEnded",
    "RunStarted",
    "RunStatusName",
    "Sample",
    "Step",
    "TrainingPlan",
    "Validation",
    "checkpoint_to_resume",
    "decode_events",
    "encode_event",
    "recorded_checkpoints",
    "single_steps",
    "write_atomically",
]
