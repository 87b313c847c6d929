"""What models that are wrapped or divided tell: whether they train, and which ranks train on the same batches."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.telemetry.clocks import Scalar
from trainer.telemetry.instrument.fetched_batches import BatchSize, plus, size_of

SAME_SAMPLES = ("tp", "cp", "sp")
"""Names of the dimensions of a DeviceMesh whose ranks have the same samples: tensor, context and sequence parallelism,
as torch's own examples call them."""
EXPERTS = "ep"
"""Name of a dimension over which experts are divided, whose ranks have samples of their own."""


class ModelParallelism:
    """Which ranks train on this rank's samples, as far as is told.

    Ranks have the same samples if a parameter, a DTensor, is sharded over them, as in tensor parallelism, or if their
    dimension of a DeviceMesh has one of the names above; those that average gradients have samples of their own.
    """

    def __init__(self) -> None:
        self.pipelined: BatchSize | None = None
        """Size of the step's micro-batches so far in a pipeline of torch, none but on the rank of its last stage; None
        without such a pipeline."""
        self.unknown = ""
        """Why it is not known which ranks have the same samples; empty if it is."""
        self._data_ranks: set[int] = set()
        """Ranks with which this one averages gradients, by DDP or FSDP2."""
        self._named: set[tuple[int, ...]] = set()
        """Ranks of each dimension with one of the names above, ascending."""
        self._sharing: WeakKeyDictionary[Optimizer, set[tuple[int, ...]]] = WeakKeyDictionary()
        """Those over which an optimizer's parameters are sharded, other than for data parallelism."""
        self._exchanges = False
        """Whether the model of this rank computes with what other ranks send in its forward pass."""
        self.gathered: set[tuple[int, ...]] = set()
        """Ranks, ascending, of each group whose data the last forward pass gathered."""
        self._all_to_all: set[tuple[int, ...]] = set()
        """Ranks, ascending, of each group that exchanges by all_to_all there, or gathers and returns the gradients:
        parts of sequences that the ranks share, or samples of their own for experts."""
        self._expert_ranks: set[tuple[int, ...]] = set()
        """Ranks, ascending, of each dimension over which experts are divided."""

    def note_mesh(self, mesh: Any) -> None:
        place = mesh.get_coordinate()
        for dimension, name in enumerate(mesh.mesh_dim_names or ()):
            if place is not None and name in (*SAME_SAMPLES, EXPERTS) and mesh.mesh.shape[dimension] > 1:
                across = [slice(None) if each == dimension else index for each, index in enumerate(place)]
                ranks = self._expert_ranks if name == EXPERTS else self._named
                ranks.add(tuple(sorted(mesh.mesh[tuple(across)].tolist())))

    def note_sharding(self, state: Any) -> None:
        """Note over which ranks FSDP2 shards or replicates parameters, by the state of its root."""
        if self._data_ranks:
            return
        for each in state._state_ctx.all_states:
            # There is one group before torch 2.12.
            groups = getattr(each, "_fsdp_param_groups", None) or [each._fsdp_param_group]
            for group in groups:
                if group is not None:
                    self._data_ranks.update(group.mesh_info.mesh.mesh.flatten().tolist())

    def note_replicas(self, model: DistributedDataParallel) -> None:
        if not self._data_ranks:
            self._data_ranks.update(dist.get_process_group_ranks(model.process_group))

    def note_exchange(self, calls: Sequence[tuple[str, Sequence[int]]], wrapped: nn.Module | None) -> None:
        """Note the collectives in a forward pass, each with the ranks of its group; ``wrapped``: the outermost wrapper.

        Attention in a ring sends, that of a part of the heads calls all_to_all, and tensor parallelism by hand sums.
        Within a wrapper, layers such as codebooks sum over ranks with samples of their own. FSDP gathers parameters.
        """
        for operation, ranks in calls:
            if operation == "send" or (wrapped is None and operation in ("all_reduce", "reduce_scatter")):
                self._exchanges = True
            elif operation == "all_to_all":
                self._all_to_all.add(tuple(ranks))
            elif operation == "all_gather" and (wrapped is None or isinstance(wrapped, DistributedDataParallel)):
                self.gathered.add(tuple(ranks))

    def note_gradients(self, calls: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Note the collectives in a backward pass, each with the ranks of its group.

        Of what a forward pass has gathered, keys and values have gradients of all ranks; statistics have none.
        """
        returning = ("reduce_scatter", "all_to_all", "scatter")  # scatter: all_to_all of torch.distributed.nn on gloo
        self._all_to_all |= self.gathered & {tuple(ranks) for operation, ranks in calls if operation in returning}
        self.gathered.clear()

    def add_micro_batch(self, stage: Any, targets: Any, index: int) -> None:
        """Add the micro-batch of this index, whose forward pass through a pipeline's stage is done."""
        size: BatchSize = 0, None
        if stage.is_last:
            samples = size_of(_inputs_of_stage(stage, index)[:1])[0]
            of_target, tokens = size_of(targets[index])
            # A target may have one dimension for samples and tokens; otherwise these samples are none.
            if samples and of_target and of_target % samples:
                samples = None
            size = samples, tokens if of_target == samples else None
        self.pipelined = plus(self.pipelined or (0, None), size)

    def size_to_count(self, size: BatchSize, optimizer: Optimizer, sends: bool, loss: Scalar) -> BatchSize:
        """Return the size of a step as this rank counts it: of a pipeline's stages that with the loss does.

        ``sends``: whether the step has sent to a single rank or received from one, as in a pipeline; ``loss``: None
        where it is not known.
        """
        pipelined = self.pipelined
        counts = self._counts_samples(optimizer, sends=sends or pipelined is not None)
        if not counts or (pipelined is None and sends and loss is None):
            return None, None
        return size if pipelined is None else pipelined if pipelined[0] else (None, None)

    def _counts_samples(self, optimizer: Optimizer, *, sends: bool) -> bool:
        """Return whether this rank counts the samples of its step: not if another one does, or if that is not known.

        ``sends``: Whether the step has sent to a single rank or received from one, as in a pipeline.
        """
        if not dist.is_available() or not dist.is_initialized():
            return True
        sharing = self._sharing.get(optimizer)
        if sharing is None:
            sharing = self._sharing[optimizer] = _sharing_ranks(optimizer, self._data_ranks)
        told = sharing | self._named
        rank, world_size, averaging = dist.get_rank(), dist.get_world_size(), len(self._data_ranks)
        why = ""
        is_told = all(any({*ranks} <= {*each} for each in told) for ranks in self._all_to_all - self._expert_ranks)
        of_experts = "" if is_told else ", or ep of experts"
        if not is_told or (self._exchanges and not told):
            why = "the model computes with data of other ranks in its forward pass"
        elif 0 < averaging * prod(map(len, told)) < world_size and not sends:
            why = f"gradients are averaged over {averaging} of {world_size} ranks"
        same = "a dimension tp, cp or sp of ranks with the same samples"
        self.unknown = why and f"{why}, and no DeviceMesh has {same}{of_experts}"
        return not why and all(rank == ranks[0] for ranks in told)


def _inputs_of_stage(stage: Any, index: int) -> Sequence[Any]:
    """Return what a pipeline's stage keeps of the inputs of a micro-batch; nothing where another torch keeps none."""
    kept = getattr(stage, "_forward_chunk_states", None)  # from torch 2.15 on
    if kept is not None:
        inputs: Sequence[Any] = kept[index].input_values
        return inputs
    kept = getattr(stage, "fwd_cache", None)
    return () if kept is None else kept[index][1]


def _sharing_ranks(optimizer: Optimizer, data_ranks: Set[int]) -> set[tuple[int, ...]]:
    """Return the ranks, ascending, of each mesh dimension over which parameters are sharded but no data is."""
    sharing: set[tuple[int, ...]] = set()
    known: set[tuple[int, int]] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is None or mesh.get_coordinate() is None:
                continue  # no DTensor, or one of other ranks
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_replicate() or (id(mesh), dimension) in known:
                    continue
                known.add((id(mesh), dimension))
                ranks = sorted(dist.get_process_group_ranks(mesh.get_group(dimension)))
                # Experts are sharded over ranks with samples of their own.
                if len(ranks) > 1 and data_ranks.isdisjoint({*ranks} - {dist.get_rank()}):
                    sharing.add(tuple(ranks))
    return sharing


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
