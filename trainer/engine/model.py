"""Preparation of a task's model for training: on its device, compiled, wrapped in DDP."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from trainer import distributed
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.tasks.task import Task
from trainer.telemetry.comm_hook import CommHook

# torch 2.13 renamed the flag and warns at the old name; older supported versions have the old name only.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    else "broadcast_buffers"
)


def checkpoint_activations(task: Task, model: nn.Module) -> None:
    """Recompute the activations of the task's ``checkpointed_modules`` in the backward pass instead of keeping them.

    The random state of the forward pass is restored for that, so that gradients do not change.

    Raises:
        RequestError: the task names none.
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


def wrap(model: nn.Module, options: Training, *, device: torch.device, world_size: int) -> nn.Module:
    """Move the model to the device, compile it and, with several ranks, wrap it in DDP.

    Raises:
        RequestError: the model has no parameter to train.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError("the task's model has no parameter to train")
    model = model.to(device)
    compiled: Any = torch.compile(model) if options.compile else model
    if world_size == 1:
        assert isinstance(compiled, nn.Module)
        return compiled
    buffers: dict[str, Any] = {_SYNC_BUFFERS: options.broadcast_buffers}
    return DDP(
        compiled,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        **buffers,
    )


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Gradient compression: a DDP comm hook and the size of its messages."""

    hook: tuple[object, CommHook] | None
    """State and comm hook; None for DDP's own averaging."""
    wire_ratio: float | None
    """Bytes on the wire per byte of gradient; None where it depends on the shapes."""


def compression(options: Training) -> Compression:
    """Return the comm hook that the options name.

    Raises:
        RequestError: the hook needs a package that is not installed.
    """
    match options.ddp_comm_hook:
        case "fp16":
            return Compression(hook=(None, default_hooks.fp16_compress_hook), wire_ratio=0.5)
        case "bf16":
            return Compression(hook=(None, default_hooks.bf16_compress_hook), wire_ratio=0.5)
        case "powersgd":
            if find_spec("numpy") is None:
                raise RequestError("--ddp-comm-hook powersgd needs numpy, which torch's hook draws from: install numpy")
            state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
            return Compression(hook=(state, powerSGD_hook.powerSGD_hook), wire_ratio=None)
    return Compression(hook=None, wire_ratio=1.0)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the task's own module, without DDP and torch.compile around it."""
    inner = model.module if isinstance(model, DDP) else model
    original = getattr(inner, "_orig_mod", inner)  # inside torch.compile's wrapper
    assert isinstance(original, nn.Module)
    return original


def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as DDP's ``broadcast_buffers`` does before each forward pass.

    A batch norm's statistics come from the batches of its rank, but the model that is evaluated and saved must be the
    same everywhere. Rank 0 never gets a dummy batch; a mean over the ranks would be wrong for some buffers.
    """
    group = distributed.get_default_group()
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if group is None or not buffers:
        return
    # As bytes: one broadcast for all dtypes.
    flat = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(flat, 0, group=group)
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
        """Return the context of a micro-step's forward and backward pass."""
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
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def has_sparse_gradients(model: nn.Module) -> bool:
    """Return whether an embedding of the model gives a sparse gradient."""
    return any(getattr(module, "sparse", False) for module in model.modules())


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Return the global gradient norm [] and, with ``max_norm`` above 0, scale the gradients down to it."""
    norm = torch.nn.utils.get_total_norm(gradients(parameters))
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
