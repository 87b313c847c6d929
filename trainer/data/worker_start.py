"""Chooses how reading processes start: forked, or from a fork server once CUDA is in use.

CUDA's threads and locks are not copied by a fork as they are in use. From a fork server everything must be sent,
which a task of a user's own need not allow.
"""

from __future__ import annotations

import io
import sys
from importlib.machinery import PathFinder
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from torch import Tensor

MAX_TENSORS = 64
"""Of a dataset that is sent: each takes an open file in both processes, of which there may be 1024."""


MAX_BYTES = 64 << 20
"""Likewise: every process gets a copy of its own, where forked ones share the memory."""


class _NotSentError(Exception):
    """A new process could not be given this."""


class _Bounded(io.RawIOBase):
    """A file that forgets what is written, and takes no more than may be sent."""

    def __init__(self) -> None:
        self._bytes = 0

    def write(self, data: Any) -> int:
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise _NotSentError
        return len(data)


class _Trial(ForkingPickler):
    """Pickles as a process's arguments are, and refuses what cannot arrive."""

    def __init__(self) -> None:
        super().__init__(_Bounded())
        self._tensors = self._bytes = 0

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._tensors += 1
            self._bytes += value.untyped_storage().nbytes()
        if self._tensors > MAX_TENSORS or self._bytes > MAX_BYTES:
            raise _NotSentError
        module = getattr(value, "__module__", None) if callable(value) else type(value).__module__
        if not (isinstance(module, str) and _is_importable(module)):
            raise _NotSentError
        return NotImplemented


def start_method(sent: object, *, cuda_in_use: bool) -> Literal["fork", "forkserver"]:
    """Return how to start processes that are given an object."""
    if not cuda_in_use:
        return "fork"
    try:
        _Trial().dump(sent)
    except Exception:  # noqa: BLE001 - whatever pickling raises, and user code with it: it cannot be sent
        return "fork"
    return "forkserver"


def _is_importable(module: str) -> bool:
    """Return whether a new process finds a module by its name, which a task's file loaded by path has not."""
    top = module.partition(".")[0]
    return top in sys.builtin_module_names or (top != "__main__" and PathFinder.find_spec(top) is not None)
