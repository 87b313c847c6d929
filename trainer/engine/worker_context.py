"""The worker context: rank, device, and where a training reports to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.contract.record import EventWriter, RankStateName
from trainer.distributed.host_copies import HostCopies


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Where this rank runs and whom it tells."""

    rank: int
    world_size: int
    device: torch.device
    writer: EventWriter
    set_state: Callable[[RankStateName], None]
    say: Callable[[str], None]
    """Prints a line for people; rank 0 only."""
    checkpoints: Path | None
    """The folder for checkpoints; None keeps none."""
    run_id: str = ""
    """Equal on all ranks of a run and on no other's; empty where it has none."""
    request: Mapping[str, str] = field(default_factory=dict)
    """Values by name that must be equal on all ranks."""
    recipe: str = ""
    """What a checkpoint keeps of the request."""
    tf32: bool | None = None
    """Whether products of 32-bit floats are rounded to TF32, for the record; None on a CPU."""
    copies: HostCopies | None = None
    """Brings numbers from the device without waiting; None chooses by the device."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether somebody wants this rank to stop at the next occasion."""
    step_took: Callable[[float], None] = lambda seconds: None
    """Told how many seconds a step takes of late, where that has changed much."""
    stopping: Callable[[], None] = lambda: None
    """Told before the last checkpoint is written: all ranks have agreed to stop, or training is complete."""
    waits: Callable[[], None] = lambda: None
    """Told before this rank waits for all others outside of steps, having done its own part."""
