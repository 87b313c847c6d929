"""Chooses what of a checkpoint is evaluated, tested and exported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.errors import CheckpointError


def weights_of(state: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the model's state: parameters and buffers by name.

    Raises:
        CheckpointError: the checkpoint holds none.
    """
    weights = state.get("model")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source}: entry model is missing, or no dict of tensors")
    return weights
