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
    """Rank and device of a training, and its outputs: events, states, log lines and callbacks."""

    rank: int
    world_size: int
    device: torch.device
    writer: EventWriter
    set_state: Callable[[RankStateName], None]
    print_line: Callable[[str], None]
    checkpoints: Path | None
    """The folder for checkpoints; None keeps none."""
    run_id: str = ""
    """Identifier of the run, equal on all its ranks; empty without one."""
    resumed_from: Path | None = None
    """The checkpoint from which this run resumes; None without one, and on ranks other than 0."""
    is_restart: bool = False
    """Whether Slurm or torchrun has started this same command again."""
    request: Mapping[str, str] = field(default_factory=dict)
    """Values by name that must be equal on all ranks."""
    recipe: str = ""
    """Text of the recipe, which checkpoints keep."""
    loss_unit: str = ""
    """Unit of the task's loss; empty: none."""
    tf32: bool | None = None
    """Whether products of 32-bit floats are rounded to TF32; None on a CPU."""
    copies: HostCopies | None = None
    """Copies numbers from the device without waiting; None chooses by the device."""
    stop_requested: Callable[[], bool] = lambda: False
    in_recipe_terms: Callable[[str], str] = str
    """Returns a message with the recipe's keys in place of flags, where the run has a recipe."""
    step_took: Callable[[float], None] = lambda seconds: None
    """Called with the recent duration of a step, in seconds, if it has changed much."""
    stopping: Callable[[], None] = lambda: None
    """Called before the last checkpoint is written: all ranks have agreed to stop, or training is complete."""
    before_wait: Callable[[], None] = lambda: None
    """Called before this rank, having done its own part, waits for all others outside of steps."""
