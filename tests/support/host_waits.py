"""Detect points at which the host would wait for a GPU, on a machine without one.

The tensors are on the CPU, and operations that read their values raise, as with
``torch.cuda.set_sync_debug_mode("error")`` on a GPU; only the memory of ``HostCopies`` may be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainer
from trainer.distributed.host_copies import HostCopies

PACKAGE = str(Path(trainer.__file__).parent)
# Operations that read values, or return a tensor whose shape depends on them.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "unique_consecutive"}
BY_NAME = {Tensor.tolist, Tensor.cpu, Tensor.numpy}


class HostWaitError(AssertionError):
    """Operation that makes the host wait for the GPU."""


class QueuedEvent:
    """Device event that is not reached until ``synchronize``."""

    def __init__(self) -> None:
        self.reached = False

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


class HostWaits:
    """Detector between ``start`` and ``stop``; the training loop must read numbers through ``copies``."""

    def __init__(self, event: Callable[[], Any] = QueuedEvent) -> None:
        self._host: set[int] = set()
        self.copies = HostCopies(event, self._memory)
        self._modes = (_Operations(self.is_host), _Calls(self.is_host))
        self._on = False

    def _memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(max(elements, 1), dtype=dtype)[:elements]
        self._host.add(memory.untyped_storage().data_ptr())
        return memory

    def is_host(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self._host

    def start(self) -> None:
        if not self._on:
            self._on = True
            for mode in self._modes:
                mode.__enter__()

    def stop(self) -> None:
        if self._on:
            self._on = False
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)

    def __enter__(self) -> HostWaits:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Operations(TorchDispatchMode):
    def __init__(self, is_host: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_host = is_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1]
        )
        if (name in READS or by_mask) and not self._is_host(args[0]):
            raise HostWaitError(f"{func} asks for values of a tensor")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, is_host: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_host = is_host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BY_NAME and not self._is_host(args[0]):
            raise HostWaitError(f"{func.__name__} copies a tensor to the host")
        named = [*args[1:], *kwargs.values()]
        to_device = func is Tensor.to and any(isinstance(given, torch.device) for given in named)
        # Calls from torch pass the tensor's own device, and copy nothing.
        from_trainer = PACKAGE in sys._getframe(1).f_code.co_filename
        if to_device and from_trainer and not any(given is True for given in named):
            raise HostWaitError("a copy to another device waits for it unless it is non_blocking")
        return func(*args, **kwargs)
