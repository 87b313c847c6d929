"""Choose the start method of data loader workers: fork, or forkserver once CUDA is in use.

A fork copies locks that CUDA's threads may hold, but not the threads. With a fork server the dataset is pickled, which
a user's own dataset may not support.
"""

from __future__ import annotations

import io
import sys
from importlib.machinery import PathFinder
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from torch import Tensor

MAX_BYTES = 64 << 20
"""Maximum bytes of a pickled dataset: every worker gets its own copy, whereas forked workers share the memory."""


class _NotPicklableError(Exception):
    """A worker of a fork server cannot be given this object."""


class _ByteCounter(io.RawIOBase):
    """File that discards the bytes written and raises beyond ``MAX_BYTES``."""

    def __init__(self) -> None:
        self._bytes = 0

    def write(self, data: Any) -> int:
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise _NotPicklableError
        return len(data)


class _TrialPickler(ForkingPickler):
    """Pickler of process arguments that raises for objects a new process could not load."""

    def __init__(self) -> None:
        super().__init__(_ByteCounter())
        self._tensors = self._bytes = 0

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._tensors += 1
            self._bytes += value.untyped_storage().nbytes()
        # Maximum tensors in a pickled dataset: each takes an open file in both processes, which may have 1024.
        max_tensors = 64
        if self._tensors > max_tensors or self._bytes > MAX_BYTES:
            raise _NotPicklableError
        module = getattr(value, "__module__", None) if callable(value) else type(value).__module__
        if not (isinstance(module, str) and _is_importable(module)):
            raise _NotPicklableError
        return NotImplemented


def start_method(argument: object, *, cuda_in_use: bool) -> Literal["fork", "forkserver"]:
    """Return the start method for workers that get this object; ``fork`` if it cannot be pickled."""
    if not cuda_in_use:
        return "fork"
    try:
        _TrialPickler().dump(argument)
    except Exception:  # noqa: BLE001 - pickling runs user code, which may raise anything
        return "fork"
    return "forkserver"


def _is_importable(module: str) -> bool:
    """Return whether a new process can import a module by its name; false for a task file loaded by path."""
    top = module.partition(".")[0]
    return top in sys.builtin_module_names or (top != "__main__" and PathFinder.find_spec(top) is not None)
