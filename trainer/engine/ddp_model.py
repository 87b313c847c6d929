"""Preparation of a task's model for training: on its device, compiled, wrapped in DDP."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from trainer import distributed
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.loader import map_values
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task
from trainer.telemetry.comm_hook import CommHook
from trainer.telemetry.step_meter import StepMeter

# torch 2.13 renamed the flag and warns at the old name; older supported versions have the old name only.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    else "broadcast_buffers"
)


class Strategy(Protocol):
    """A model that is trained by several ranks together, in one of the two ways of ``--strategy``."""

    sharded: bool
    """Whether each rank holds a part of every parameter, so that each pass is one of all ranks together."""
    model: nn.Module
    """Called in training."""
    module: nn.Module
    """The task's own."""
    needs_all_gradients: bool
    """Whether the ranks wait for the gradient of every parameter."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-step's forward and backward pass; ``last``: of an optimizer step."""

    def clip(self, values: list[Tensor], max_norm: float, rows: Mapping[int, Tensor]) -> Tensor | float:
        """Return the norm [] of all gradients, with this rank's values; scale them down to ``max_norm`` if above 0.

        ``rows`` are the only rows with values [rows] of some gradients, by their addresses.
        """

    def measure(self, meter: StepMeter) -> None:
        """Have a meter follow collectives that no bucket of DDP makes."""

    def whole(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint's entries on rank 0, an empty dict on the others; every rank calls this.

        Raises:
            OSError: on rank 0, after all collectives: whole tensors could not be stored.
        """

    def spread(self, entries: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a checkpoint's entries, of a function that is called on rank 0, on every rank, as the model has them.

        Raises:
            RequestError: the function has raised one; all ranks raise it.
        """


class Replicated:
    """The whole model on every rank, whose gradients DDP averages; on one rank the model alone."""

    sharded = False

    def __init__(self, model: nn.Module, options: Training, ctx: WorkerContext) -> None:
        self.model = wrap(model, options, device=ctx.device, world_size=ctx.world_size)
        self.module = unwrap(self.model)
        ddp = self.model if isinstance(self.model, DDP) else None
        self.needs_all_gradients = ddp is not None and not (ddp.find_unused_parameters or ddp.static_graph)
        self.micro_step = Accumulation(self.model)
        one_device = len({each.device for each in self.module.parameters()}) == 1
        on_host = ctx.device.type == "cpu" and ctx.copies is None
        self._total_norm: Callable[[list[Tensor]], Tensor | float] = (
            host_norm if on_host else total_norm if one_device else torch.nn.utils.get_total_norm
        )

    def clip(self, values: list[Tensor], max_norm: float, rows: Mapping[int, Tensor]) -> Tensor | float:
        nonzero = (
            [value.index_select(0, rows[at]) if (at := value.data_ptr()) in rows else value for value in values]
            if rows
            else values
        )
        return clip(values, self._total_norm(nonzero), max_norm)

    def measure(self, meter: StepMeter) -> None:
        """Follow nothing more: DDP's comm hook measures."""

    def whole(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return state() if distributed.is_master() else {}

    def spread(self, entries: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = distributed.from_master(entries)
        return found


def checkpoint_activations(task: Task, model: nn.Module) -> None:
    """Recompute the activations of the task's ``checkpointed_modules`` in the backward pass instead of keeping them.

    The random state of the forward pass is restored for that, so that gradients do not change.
    """
    modules = task.checkpointed_modules(model)
    if not modules:
        raise RequestError(
            f"--activation-checkpointing: {type(task).__name__} names no modules whose activations may be computed "
            "again: give it checkpointed_modules(model), such as the blocks of a Transformer"
        )
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if any(isinstance(inner, norms) for module in modules for inner in module.modules()):
        raise RequestError(
            "--activation-checkpointing: a module whose activations are computed again has a batch norm, which would "
            f"count each batch twice: leave it out of {type(task).__name__}.checkpointed_modules(model)"
        )
    for module in modules:
        # The method is replaced, not the module, so that parameter names and hooks on the module stay as they are.
        module.forward = _recomputed(module.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def require_trainable(model: nn.Module, options: Training) -> None:
    """Require parameters to train, all of known shape: none that the first batch would make; and an autocast of use."""
    if not isinstance(model, nn.Module):
        raise RequestError(f"the task's model() returned a {type(model).__name__}, but must return a torch.nn.Module")
    if not (parameters := trainable(model)):
        raise RequestError("the task's model has no parameter to train")
    if options.precision != "fp32" and {parameter.dtype for parameter in parameters} == {torch.float64}:
        raise RequestError(
            f"--precision is {options.precision}, but the parameters of the model are float64, which autocast leaves "
            "as they are: leave it out, or build the model in float32"
        )
    for name, module in model.named_modules():
        if any(isinstance(each, UninitializedParameter) for each in module.parameters(recurse=False)):
            raise RequestError(
                f"{name or 'the model'} is a {type(module).__name__}, whose parameters have no shape before its first "
                "batch: give the shape, or run a batch through the model in the task's model()"
            )


def wrap(model: nn.Module, options: Training, *, device: torch.device, world_size: int) -> nn.Module:
    """Move the model to the device, compile it and, with several ranks, wrap it in DDP."""
    model = model.to(device)
    compiled: Any = model if options.compile == "off" else torch.compile(model)
    if world_size == 1:
        assert isinstance(compiled, nn.Module)
        return compiled
    buffers: dict[str, Any] = {_SYNC_BUFFERS: options.broadcast_buffers}
    ddp = DDP(
        compiled,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        **buffers,
    )
    if not (options.static_graph or options.find_unused_parameters):
        _arrange_buckets(ddp)
    return ddp


def _arrange_buckets(ddp: DDP) -> None:
    """Have DDP arrange its buckets before the first step: parameters from last to first.

    By itself it arranges them anew after the first step of each process. A resumed training would make that step with
    other buckets than an uninterrupted one, and the order in which a ring adds three or more ranks depends on the place
    in the bucket. DDP never rearranges them where it searches for unused parameters; with a static graph it learns the
    graph from the first backward pass, which must be a true one.
    """
    parameters = trainable(ddp)
    sparse = {id(each) for each in with_sparse_gradient(ddp)}
    ddp.reducer.prepare_for_backward([])
    with torch.enable_grad():
        touched: list[Tensor] = [_Touch.apply(each, id(each) in sparse) for each in parameters]  # type: ignore[no-untyped-call]
    torch.autograd.backward(touched)  # the last one first
    for parameter in parameters:
        parameter.grad = None
    # All ranks meet in it: in the first forward pass they would wait there for a rank that has not come to that.
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sparse: bool) -> Tensor:
        ctx.parameter, ctx.sparse = parameter, sparse
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape = ctx.parameter.shape
        if not ctx.sparse:
            return torch.zeros_like(ctx.parameter), None
        rows = torch.empty((1, 0), dtype=torch.int64, device=ctx.parameter.device)
        return torch.sparse_coo_tensor(rows, ctx.parameter.new_zeros((0, *shape[1:])), shape), None


def compression(options: Training) -> tuple[tuple[object, CommHook] | None, float | None]:
    """Return state and function of the comm hook that the options name, and its bytes sent per byte of gradient.

    No hook is DDP's own averaging; no ratio means that it depends on the shapes.
    """
    match options.ddp_comm_hook:
        case "fp16":
            return (None, default_hooks.fp16_compress_hook), 0.5
        case "bf16":
            return (None, default_hooks.bf16_compress_hook), 0.5
        case "powersgd":
            if find_spec("numpy") is None:
                raise RequestError("--ddp-comm-hook powersgd needs numpy, which torch's hook draws from: install numpy")
            state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
            return (state, powerSGD_hook.powerSGD_hook), None
    return None, 1.0


def unwrap(model: nn.Module) -> nn.Module:
    """Return the task's own module, without DDP and torch.compile around it."""
    inner = model.module if isinstance(model, DDP) else model
    original = getattr(inner, "_orig_mod", inner)  # inside torch.compile's wrapper
    assert isinstance(original, nn.Module)
    return original


@contextlib.contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after a pass that counts for nothing, such as the statistics of a batch norm.

    The block includes the backward pass, which may use buffers as they are.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def share_buffers(model: nn.Module, *, source: int) -> None:
    """Give every rank the buffers of one, as DDP's ``broadcast_buffers`` does before each forward pass with rank 0's.

    A batch norm's statistics come from the batches of its rank, but the model that is evaluated and saved must be the
    same everywhere. A mean over the ranks would be wrong for some buffers.
    """
    group = distributed.get_default_group()
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if group is None or not buffers:
        return
    # As bytes: one broadcast for all dtypes.
    flat = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(flat, source, group=group)
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    with torch.no_grad():
        for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
            # A copy, because the part may not be aligned for the buffer's dtype.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def autocast(options: Training, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass; null in fp32, where a disabled autocast would cost 0.1 ms each time."""
    if options.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if options.precision == "fp16" else torch.bfloat16)


class Accumulation:
    """Gradient accumulation: only an update's last micro-step reduces gradients, the others run under ``no_sync``.

    With a static graph the very first backward pass reduces too, because DDP learns the graph from it. The gradients
    stay exact: the last reduction averages them again, which does not change values that are equal on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DDP) else None
        self._learning = self._ddp is not None and self._ddp.static_graph

    def __call__(self, *, last: bool) -> AbstractContextManager[Any]:
        reduces, self._learning = last or self._learning, False
        if reduces or self._ddp is None:
            return contextlib.nullcontext()
        return self._ddp.no_sync()


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to the device, asynchronously from pinned memory."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return map_values(lambda value: to_device(value, device), batch)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_sparse_gradient(model: nn.Module) -> list[Tensor]:
    """Return the parameters of embeddings that give a sparse gradient."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    ]


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor, the values of a sparse one, or this rank's shard of a sharded one; they share its memory."""
    if tensor.is_sparse:
        return tensor._values()
    # By its attribute: importing DTensor takes long.
    return tensor if type(tensor) in (Tensor, nn.Parameter) else getattr(tensor, "_local_tensor", tensor)


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one; of a sparse gradient its values."""
    return [values_of(parameter.grad) for parameter in parameters if parameter.grad is not None]


def coalesce(parameters: Sequence[nn.Parameter]) -> None:
    """Add up the rows of sparse gradients that occur several times: their norm is not that of the sum."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def scale(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a factor, a number or a tensor []."""
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        torch._foreach_mul_(same, factor_for(factor, dtype))


def factor_for(factor: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """Return a factor for tensors of a dtype, cast if it is a tensor [], so that their product keeps the dtype."""
    return factor.to(dtype) if isinstance(factor, Tensor) else factor


def total_norm(values: list[Tensor]) -> Tensor:
    """Return the norm [] of tensors on one device: torch's ``get_total_norm`` in half the time."""
    if not values:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm


def host_norm(values: list[Tensor]) -> float:
    """Return the norm of tensors on the CPU, in two thirds of the time of ``total_norm``."""
    return math.hypot(*[norm.item() for norm in torch._foreach_norm(values)]) if values else 0.0


def clip(values: Sequence[Tensor], norm: Tensor | float, max_norm: float) -> Tensor | float:
    """Scale gradients down from their norm [] to ``max_norm``, if that is above 0; return the norm before."""
    if max_norm > 0:
        factor = max_norm / (norm + 1e-6)
        # Of a tensor without a branch, which would be a sync point.
        scale(values, torch.clamp(factor, max=1.0) if isinstance(factor, Tensor) else min(factor, 1.0))
    return norm
