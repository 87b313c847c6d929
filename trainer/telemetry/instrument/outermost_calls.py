"""Calls of a script's outermost module, of which no wrapper such as DistributedDataParallel tells.

A global hook of torch makes every call of a module slower, so it is there only while a call is awaited: from a
backward pass to the next forward pass. It is never there once the script uses ``torch.compile``, which would trace it:
from then on only calls of compiled modules are seen, from outside of what is compiled.
The end of the call is told by a hook of the module itself, which is there up to the backward pass, for further calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class OutermostCalls:
    """Awaits calls.

    Args:
        begin: Called with a module before its forward pass; returns whether this is the awaited call.
        end: Called after that, and after each further call before ``end_calls``, with the module, its arguments and its
            output, which is None if it raised an exception.
    """

    def __init__(
        self,
        begin: Callable[[nn.Module], bool | None],
        end: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], object],
    ) -> None:
        self._begin = begin
        self._end = end
        self._awaiting: Any = None
        """Handle of the global hook."""
        self._ending: Any = None
        """Handle of the module's hook."""
        self._stopped = False
        self._awaits_compiled = False

    def await_next(self) -> None:
        self._awaits_compiled = True
        if self._awaiting is None and not self._stopped:
            self._awaiting = register_module_forward_pre_hook(self._before)

    @property
    def is_awaited(self) -> bool:
        """Whether a call is awaited that has not come."""
        return self._awaiting is not None

    def stop(self) -> None:
        """Await no further call."""
        self._stopped = True
        self._remove()
        self.end_calls()

    def end_calls(self) -> None:
        """Follow no further call of the module whose call was awaited."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.remove()

    def begins_with(self, compiled: nn.Module) -> bool:
        """Return whether the call of a compiled module, which begins, is the awaited one."""
        if not (self._stopped and self._awaits_compiled and self._begin(compiled)):
            return False
        self._awaits_compiled = False
        return True

    def _remove(self) -> None:
        awaiting, self._awaiting = self._awaiting, None
        if awaiting is not None:
            awaiting.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._awaiting is None or not self._begin(module):
            return
        self._remove()
        self.end_calls()
        if not isinstance(module, torch.jit.ScriptModule):  # has no hooks of its own
            self._ending = module.register_forward_hook(_EndHook(self._end), with_kwargs=True, always_call=True)


class _EndHook:
    """Hook at the end of a call; a copy of the module, made by an interrupted script, has one that does nothing."""

    def __init__(self, after: Callable[..., object]) -> None:
        self._after = after

    def __call__(self, *given: Any) -> None:
        self._after(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
