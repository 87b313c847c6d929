"""A model whose parameters, gradients and optimizer state are divided among the ranks, by torch's ``fully_shard``.

Each rank holds a part of every parameter, along its first dimension. A block is gathered before its forward and its
backward pass and freed after them; its gradients are averaged over the ranks, which keep their part each.

A checkpoint is one file, as of every training, so that it is kept, resumed on any number of ranks, exported and
evaluated like all others. Tensors are gathered one at a time, and wait for the disk in mapped files of the folder for
checkpoints, since not even rank 0 may have memory for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer import distributed
from trainer.contract.errors import MachineNotReadyError, RequestError
from trainer.contract.option_rules import require_ranks
from trainer.contract.options import Training
from trainer.engine.ddp_model import clip, with_sparse_gradient
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.collectives.interception import wrap_calls
from trainer.telemetry.step_meter import StepMeter

_TENSOR = "\0tensor"
"""Key of a tensor's number, in the place of the tensor."""


class FullySharded:
    """The model, divided among all ranks.

    Every micro-step reduces its gradients, also those that are accumulated: kept back, they would be whole on each
    rank.

    Raises:
        RequestError: there is one rank, or the model cannot be divided; one line that names what is in the way.
        MachineNotReadyError: this torch divides models on GPUs only.
    """

    sharded = True
    needs_all_gradients = True

    def __init__(self, task: Task, model: nn.Module, options: Training, ctx: WorkerContext) -> None:
        require_ranks(options, ctx.world_size)
        if ctx.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise MachineNotReadyError(
                f"--strategy fsdp on CPU ranks needs a newer torch than {torch.__version__}, which has it on GPUs "
                "only; --strategy ddp works"
            )
        blocks = blocks_of(task, model)
        _require_divisible(task, model, blocks)
        self.model = self.module = model
        self._ctx = ctx
        world = distributed.get_default_group()
        assert world is not None
        # Of its own, by which the record names it; torch would give it another time-out.
        self._group: Any = dist.new_group(
            timeout=world._get_backend(ctx.device).options._timeout, group_desc="mesh_fsdp"
        )
        self._mesh = DeviceMesh.from_group(self._group, ctx.device.type, mesh_dim_names=("fsdp",))
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
        )
        kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        for module in (*blocks, model):
            _take_from_rank_0(module, ctx.device, self._group)
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        ctx.print_line(f"the model is divided among {ctx.world_size} ranks, by {len(blocks)} modules ({kinds})")

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip(self, values: list[Tensor], max_norm: float, rows: Mapping[int, Tensor]) -> Tensor | float:
        own = torch.nn.utils.get_total_norm(values)
        square = own.to(torch.float64).square()
        dist.all_reduce(square, group=self._group)
        return clip(values, square.sqrt().to(own.dtype), max_norm)

    def measure(self, meter: StepMeter) -> None:
        if self._ctx.writer.enabled:
            collectives = CollectiveMeter()
            wrap_calls(collectives)
            meter.follow_collectives(collectives, in_backward=lambda: True)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def whole(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        entries = state()
        stored = _StoredTensors(self._ctx.checkpoints) if self._ctx.rank == 0 else None
        first: dict[int, str] = {}
        tied = {
            name: first.setdefault(id(each), name)
            for name, each in self.module.named_parameters(remove_duplicate=False)
        }
        whole: dict[str, Any] = {}
        for name, value in entries["model"].items():
            same = tied.get(name, name)
            whole[name] = whole[same] if same in whole else _whole(value, stored)
        gathered = {key: whole if key == "model" else _whole(value, stored) for key, value in entries.items()}
        if stored is None:
            return {}
        if stored.error is not None:
            raise stored.error
        return gathered

    def spread(self, entries: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        tensors: list[Tensor] = []
        owners: list[str] = []

        def outline() -> dict[str, Any]:
            state = dict(entries())
            names = [str(name) for name in state.get("parameters", ())]

            def without(value: Any, owner: str) -> Any:
                if isinstance(value, Tensor):
                    tensors.append(value)
                    owners.append(owner)
                    return {_TENSOR: len(tensors) - 1}
                if isinstance(value, Mapping):
                    return {key: without(each, owner) for key, each in value.items()}
                return value

            for key in ("model", "plain"):
                if isinstance(state.get(key), Mapping):
                    state[key] = {name: without(value, str(name)) for name, value in state[key].items()}
            if isinstance(state.get("optimizer"), Mapping) and isinstance(state["optimizer"].get("state"), Mapping):
                of_each = state["optimizer"]["state"].items()
                held = {
                    index: without(each, names[index] if isinstance(index, int) and index < len(names) else "")
                    for index, each in of_each
                }
                state["optimizer"] = {**state["optimizer"], "state": held}
            kinds = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in tensors]
            return {"state": state, "kinds": kinds, "owners": owners}

        sent = distributed.from_master(outline)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        received: list[Tensor] = []
        for index, ((dtype, shape), owner) in enumerate(zip(sent["kinds"], sent["owners"], strict=True)):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._ctx.device)
            if tensors:
                tensor.copy_(tensors[index])
            if tensor.numel():
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self._group)
            like = parameters.get(owner)
            if isinstance(like, DTensor) and like.shape == tensor.shape:
                received.append(_shard(tensor, like))
            else:
                received.append(tensor.cpu())
        return _with_tensors(sent["state"], received)  # type: ignore[no-any-return]


class _StoredTensors:
    """Copies on the host: each in a file of a folder, mapped and without a name, so that no memory is taken."""

    def __init__(self, folder: Path | None) -> None:
        self.error: OSError | None = None
        """Why a tensor could not be stored; the later ones are not stored either."""
        self._folder = folder

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._folder is None or self.error is not None or not tensor.numel():
            return tensor.new_empty(tensor.shape if self.error is None else 0, device="cpu")
        path = self._folder / ".gathered.pt.tmp"
        try:
            self._folder.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("xb") as file:
                # A mapped file without room on the disk would end the process at the first write.
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
            stored = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError as error:
            self.error = error
            return tensor.new_empty(0, device="cpu")
        finally:
            path.unlink(missing_ok=True)
        return stored.view(tensor.shape).copy_(tensor)


def _whole(value: Any, stored: _StoredTensors | None) -> Any:
    """Return a part of a state with its tensors whole and on the CPU; None in their place where nothing is stored."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            whole = value.full_tensor()  # a collective
        return None if stored is None else stored(whole)
    if isinstance(value, Tensor):
        return None if stored is None else value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _whole(each, stored) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_whole(each, stored) for each in value)
    return value


def _shard(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor as that of a parameter, in memory of its own."""
    rank, ranks = like.device_mesh.get_local_rank(), like.device_mesh.size()
    rows = -(-whole.shape[0] // ranks)  # as torch.chunk
    own = whole[rank * rows : (rank + 1) * rows].clone()
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    return value


def _take_from_rank_0(module: nn.Module, device: torch.device, group: Any) -> None:
    """Move the parameters and buffers that are not divided yet to the device, with rank 0's values, as DDP does."""
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, DTensor):
            continue
        tensor.data = tensor.data.to(device).contiguous()
        if tensor.numel():
            dist.broadcast(tensor.data.reshape(-1).view(torch.uint8), 0, group=group)


# ---------------------------------------------------------------------------------------------------------- blocks


def repeated_block(model: nn.Module) -> list[nn.Module]:
    """Return the modules of one class, with parameters of the same names and shapes, that hold most of the model.

    Of equal ones the outermost; none if no module is repeated.
    """
    repeated: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
        if shapes and module is not model and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            repeated.setdefault((type(module), shapes), []).append(module)
    sizes = {
        key: sum(each.numel() for module in modules for each in module.parameters())
        for key, modules in repeated.items()
        if len(modules) > 1
    }
    return repeated[max(sizes, key=sizes.__getitem__)] if sizes else []


def blocks_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the modules by which a task's model is divided, the inner ones of nested ones first.

    Raises:
        RequestError: there are none, or the hook returns something else; one line that names its class.
    """
    where = f"{type(task).__name__}.shard_modules()"
    returned = task.shard_modules(model)
    if not isinstance(returned, Iterable):
        raise RequestError(f"{where} returned a {type(returned).__name__}, but must return a list of modules")
    named = list(returned)
    known = {id(module): name for name, module in model.named_modules()}
    for index, module in enumerate(named):
        if not isinstance(module, nn.Module) or id(module) not in known:
            raise RequestError(f"{where} returned at {index} a {type(module).__name__} that is no module of the model")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise RequestError(
                f"{where} returned {known[id(module)]}, a {type(module).__name__}, which is never called: return the "
                "modules in it"
            )
    chosen = {id(module) for module in named or repeated_block(model)}
    if not chosen:
        raise RequestError(
            f"--strategy fsdp divides a model by its repeated block, and that of {type(task).__name__} has none: give "
            "the task shard_modules(model), which returns the modules to divide it by, or take --strategy ddp"
        )
    return [module for module in reversed(list(model.modules())) if id(module) in chosen and module is not model]


def _require_divisible(task: Task, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Require what ``fully_shard`` needs of the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if sparse := with_sparse_gradient(model):
        raise RequestError(
            f"--strategy fsdp: {names[id(sparse[0])]} has sparse gradients, whose rows cannot be divided among the "
            "ranks: give its embedding sparse=False, or take --strategy ddp"
        )
    group_of: dict[int, int] = {}
    """Group of each parameter, by identity: that of the first, innermost block that holds it."""
    kinds: dict[int, tuple[str, torch.dtype]] = {}
    """A parameter of each group, and its dtype."""
    for group, block in enumerate((*blocks, model)):
        for parameter in block.parameters():
            group_of.setdefault(id(parameter), group)
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise RequestError(
                f"--strategy fsdp: {name} is a single number and cannot be divided: give it the shape [1]"
            )
        other, dtype = kinds.setdefault(group_of[id(parameter)], (name, parameter.dtype))
        if parameter.dtype is not dtype:
            raise RequestError(
                f"--strategy fsdp: {other} and {name} are of one block and differ in dtype ({dtype}, "
                f"{parameter.dtype}): give them one"
            )
    innermost: dict[int, int] = {}
    for group, block in enumerate((*blocks, model)):
        for module in block.modules():
            owner = innermost.setdefault(id(module), group)
            for parameter in module.parameters(recurse=False):
                if group_of[id(parameter)] != owner:
                    raise RequestError(
                        f"--strategy fsdp: {names[id(parameter)]} is shared between a block and a module outside of "
                        f"it: return blocks from {type(task).__name__}.shard_modules() that share nothing"
                    )
