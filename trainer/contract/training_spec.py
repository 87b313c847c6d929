"""The training of a command line, typed once by the node agent's process and passed to every rank."""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.options import Training


class TrainingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a training and of its task."""

    training: Training
    task_options: Any = None
    """Options of a built-in task; None for a user's own, whose schema a rank gets with the task's import."""
    task_flags: tuple[str, ...] = ()
    """Flags that are not the trainer's, for the schema of a user's own task."""
    notes: tuple[str, ...] = ()
    """Lines about flags without an effect, which rank 0 prints."""
