"""What models that are wrapped or divided tell: whether they train, and which ranks train on the same batches."""

from __future__ import annotations

from collections.abc import Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class ModelParallelism:
    """Which mesh dimensions are of data parallelism, and whether this rank's batches are another one's too."""

    def __init__(self) -> None:
        self._data_dimensions: set[str] = set()
        """Names of the mesh dimensions over which FSDP2 shards or replicates; empty for a mesh without names."""
        self._repeating: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def note_sharding(self, state: Any) -> None:
        """Note over which dimensions FSDP2 shards parameters, by the state of its root."""
        if self._data_dimensions:
            return
        for each in state._state_ctx.all_states:
            # There is one group before torch 2.12.
            groups = getattr(each, "_fsdp_param_groups", None) or [each._fsdp_param_group]
            for group in groups:
                if group is not None:
                    self._data_dimensions.update(group.mesh_info.mesh.mesh_dim_names or ("",))

    def repeats_batches(self, optimizer: Optimizer) -> bool:
        """Return whether another rank, with parts of the same parameters, counts this rank's batches.

        That is so where a parameter, a DTensor, is sharded over a mesh dimension other than those of data parallelism,
        as in tensor parallelism, and this rank is not the first one of that dimension.
        """
        repeats = self._repeating.get(optimizer)
        if repeats is None:
            repeats = self._repeating[optimizer] = _repeats(optimizer, self._data_dimensions)
        return repeats


def _repeats(optimizer: Optimizer, data_dimensions: Set[str]) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is None:
                continue  # no DTensor
            names = mesh.mesh_dim_names or [""] * mesh.ndim
            place = mesh.get_coordinate() or [0] * mesh.ndim
            for name, index, placement in zip(names, place, parameter.placements, strict=True):
                if name not in data_dimensions and index and not placement.is_replicate():
                    return True
    return False


def is_trained(model: nn.Module) -> bool:
    """Return whether a model has parameters that are trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a wrapper, DistributedDataParallel or FSDP, tells of a model's forward pass or of a part of it."""
    # FSDP's by their names: importing them takes long.
    wrappers = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")
    return any(base.__name__ in wrappers for module in model.modules() for base in type(module).__mro__)


def is_training(model: nn.Module) -> bool:
    """Return whether a forward pass of this model belongs to a training step."""
    inner: nn.Module = model
    if isinstance(model, DistributedDataParallel):
        inner = model.module  # Lightning sets only the flag of the inner model back after an evaluation
    return getattr(inner, "_fsdp_wrapped_module", inner).training and torch.is_grad_enabled()
