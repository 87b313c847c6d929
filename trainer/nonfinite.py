"""Names the module that first produced a non-finite number, by running the offending batch once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.tasks.task import Task

NOT_REPRODUCED = "not reproduced"


def locate(task: Task, model: nn.Module, batch: Any) -> str:
    """Say where the first non-finite number of a forward and backward pass appears.

    The pass runs on the unwrapped model, so no other rank takes part. Dropout draws anew; what comes from data or
    parameters shows again.

    Returns:
        For people: ``output of blocks.3.mlp``, ``gradient of embedding.weight``, or ``not reproduced``.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _finite(tensor):
            return f"parameter {name}"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_output_hook(name, found))
        for name, module in model.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        loss, _, _ = task.loss(model, batch)
        if found:
            return found[0]
        if not _finite(loss):
            return "the loss itself, from finite outputs"
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Backward runs from the last module to the first, so the last bad parameter is where it began.
    for name, gradient in reversed(list(zip(names, gradients, strict=True))):
        if gradient is not None and not _finite(gradient):
            return f"gradient of {name}"
    return NOT_REPRODUCED


def _output_hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(isinstance(tensor, Tensor) and not _finite(tensor) for tensor in outputs):
            found.append(f"output of {name or type(module).__name__} ({type(module).__name__})")

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
