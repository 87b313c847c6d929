"""List the entries of a training's state with their types, to detect entries missing from a checkpoint.

A checkpoint keeps this list beside the state, as ``torch.distributed.checkpoint`` does in its metadata. Without it, a
parameter that never had a gradient, and so has no moments, could not be distinguished from one whose moments are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ENTRIES = "entries"
"""Key of the list in a checkpoint."""


def kinds(state: Any, where: str = "") -> dict[str, str]:
    """Return the type of every entry by its path: ``{"model['0.bias']": "float32 [16]", "updates": "int"}``."""
    return dict(_walk(state, where))


def _walk(state: Any, where: str) -> Iterator[tuple[str, str]]:
    if where:
        yield where, _kind(state)
    if isinstance(state, Mapping):
        for key, value in state.items():
            plain = not where and isinstance(key, str) and key.isidentifier()
            yield from _walk(value, str(key) if plain else f"{where}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _walk(value, f"{where}[{index}]")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        dense = value.layout is torch.strided and not value.is_meta
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{'' if dense else ' not dense'}"
    if value is None:
        return "None"
    # The type in a checkpoint: an enum or a numpy scalar that subclasses a plain type is saved as that type.
    for kind in (bool, int, float, str, bytes, Mapping, list, tuple):
        if isinstance(value, kind):
            return "dict" if kind is Mapping else kind.__name__
    return type(value).__name__


def difference(actual: Mapping[str, str], expected: Mapping[Any, Any], *, of: str) -> str:
    """Describe the first entry whose type differs from the expected one; empty if all are equal."""
    for path, kind in expected.items():
        if path not in actual:
            return f"entry {path} is missing, but is {kind} {of}"
        if actual[path] != kind:
            return f"entry {path} is {actual[path]}, but {kind} {of}"
    for path, kind in actual.items():
        if path not in expected:
            return f"entry {path} is {kind}, but does not exist {of}"
    return ""
