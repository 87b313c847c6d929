"""Set-up of a GPU for training: number formats, cuDNN algorithms, allocator, and copies of batches to it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.loader import leaves
from trainer.engine.ddp_model import to_device
from trainer.host.cores import read_cpus

AMPERE = (8, 0)
"""The first compute capability with TF32 and bf16."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that configure torch's CUDA allocator: the older name, and that of later versions."""
EXPANDABLE = "expandable_segments:True"
"""Against fragmentation: batches of varying length otherwise leave gaps that fit no later one."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACE = ":4096:8"
"""One of two workspaces with which cuBLAS repeats its sums bit for bit (its documentation, "reproducibility")."""


def prepare_environment(options: Training, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that CUDA and torch's allocator read at their first use; keep the user's own."""
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = EXPANDABLE
    if options.deterministic:
        environ.setdefault(CUBLAS_WORKSPACE, REPEATABLE_WORKSPACE)


def set_numerics(
    options: Training,
    device: torch.device,
    *,
    capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
    name: Callable[[torch.device], str] = torch.cuda.get_device_name,
) -> bool | None:
    """Set the precision of a GPU's matrix products and convolutions; return whether it is TF32, None on a CPU."""
    if device.type != "cuda":
        return None
    actual = capability(device)
    if options.precision == "bf16" and actual < AMPERE:
        raise RequestError(
            f"--precision bf16 needs a GPU of compute capability 8.0 or later, and {name(device)} has "
            f"{actual[0]}.{actual[1]}: allowed here are fp32 and fp16"
        )
    tf32 = options.tf32 and actual >= AMPERE
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    with warnings.catch_warnings():
        # The setting that replaces this one is not in all supported versions of torch.
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = tf32
    return tf32


def device_model(device: torch.device) -> str:
    """Return the model of a rank's device, for a CPU with the threads of the rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{read_cpus().model}, {torch.get_num_threads()} threads"


def choose_algorithms(options: Training, device: torch.device, *, few_shapes: bool) -> None:
    """Have cuDNN benchmark its algorithms per shape if shapes are few and ``--deterministic`` is not set."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = few_shapes and not options.deterministic


class DeviceCopy:
    """Copier of batches to a GPU on a separate stream, where copies overlap with queued kernels.

    The host runs ahead of the GPU, so a copy is done before the preceding step has ended.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: Callable[[torch.device], Any] = torch.cuda.Stream,
        current_stream: Callable[[torch.device], Any] = torch.cuda.current_stream,
        on: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        self._device = device
        self._current_stream = current_stream
        self._on = on
        self._stream = stream(device)

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; work queued afterwards on the current stream waits for the copy."""
        compute = self._current_stream(self._device)
        with self._on(self._stream):
            moved = to_device(batch, self._device)
        compute.wait_stream(self._stream)
        # Otherwise the allocator may reuse the memory while the current stream reads it.
        for leaf in leaves(moved):
            if isinstance(leaf, Tensor):
                leaf.record_stream(compute)
        return moved


def batch_copy(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that copies a batch to this device."""
    return DeviceCopy(device) if device.type == "cuda" else lambda batch: batch
