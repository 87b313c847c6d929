"""Copies the state of a training off the GPU at one moment: tensors, plain values, random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import CheckpointError

_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


def copy_to_cpu(state: Any) -> Any:
    """Return the state with every tensor copied to the CPU, and everything else as plain lists, tuples and dicts.

    Tensors that share memory entirely, tied weights, still share it in the copy; a view of part of a larger tensor
    is copied alone.

    Raises:
        CheckpointError: the state holds something that cannot come back with ``weights_only=True``.
    """
    return _copy(state, "state", {})


def _copy(state: Any, where: str, seen: dict[tuple[Any, ...], Tensor]) -> Any:
    if state is None:
        return state
    if isinstance(state, bytes) and not state:
        raise CheckpointError(f"{where} is empty bytes, which torch does not load with weights_only=True")
    for plain in _PLAIN:
        if isinstance(state, plain):
            return plain(state)  # an enum or a numpy scalar would not come back with weights_only=True
    if isinstance(state, Tensor) and state.layout is torch.strided:
        # Empty tensors all have address 0.
        key = (state.device, state.data_ptr() or id(state), state.dtype, tuple(state.shape), state.stride())
        if key not in seen:
            seen[key] = state.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(state, Mapping):
        return {_key(key, where): _copy(value, f"{where}[{key!r}]", seen) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value, f"{where}[{index}]", seen) for index, value in enumerate(state)]
    if isinstance(state, tuple):
        return tuple(_copy(value, f"{where}[{index}]", seen) for index, value in enumerate(state))
    kind = type(state)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds dense tensors, numbers, strings, "
        "lists, tuples and dicts"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float | bool | tuple):
        return key
    raise CheckpointError(f"{where} has the key {key!r}: a checkpoint's keys are strings, numbers or tuples of them")


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the random numbers of Python, torch's CPU, this rank's GPU, and numpy where it is in use.

    Args:
        device: the GPU; default: the current one, where CUDA is in use.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized() and (  # type: ignore[no-untyped-call]
        device is None or device.type == "cuda"
    ):
        state["cuda"] = torch.cuda.get_rng_state(device if device is not None else "cuda")
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [
            str(kind),
            torch.tensor(keys.tolist(), dtype=torch.int64),
            *(plain(each) for plain, each in zip((int, int, float), rest, strict=True)),
        ]
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Set the random numbers to a captured state; a GPU's and numpy's are passed over where they are not in use."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.set_rng_state(state["cuda"].cpu(), device if device is not None else "cuda")
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.tolist(), position, has_gauss, gauss))
