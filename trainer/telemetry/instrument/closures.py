"""Closures that optimizers call several times in a step, as LBFGS does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import LBFGS, Optimizer


def with_closure(
    optimizer: Optimizer, arguments: Sequence[Any], named: Mapping[str, Any], end: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer's step with a closure that calls ``end`` after each of its calls.

    None if there is no closure, or one that the optimizer calls once.
    """
    first = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    closure = named.get("closure") or (arguments[1] if len(arguments) > 1 else None)  # the first one is the optimizer
    if first or not callable(closure):
        return None

    @functools.wraps(closure)
    def followed(*given: Any, **others: Any) -> Any:
        result = closure(*given, **others)
        end()
        return result

    if "closure" in named:
        return tuple(arguments), {**named, "closure": followed}
    return (arguments[0], followed, *arguments[2:]), dict(named)
