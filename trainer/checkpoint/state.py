"""State of a training: copied to the CPU at one moment, with random number generators, and listed by its entries."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import CheckpointError

_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


class HostTensors:
    """Copies of tensors on the CPU; from a GPU asynchronously into pinned memory, behind the work queued there.

    The training continues meanwhile; the thread that reads the copies calls ``wait``.

    ``empty_like`` allocates pinned memory, and ``event`` makes a marker in the queue of the current GPU.
    """

    def __init__(
        self,
        *,
        on_gpu: Callable[[Tensor], bool] = lambda tensor: tensor.device.type == "cuda",
        empty_like: Callable[[Tensor], Tensor] = lambda like: torch.empty_like(like, device="cpu", pin_memory=True),
        event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._on_gpu = on_gpu
        self._empty_like = empty_like
        self._event = event
        self._device: torch.device | None = None
        self._copied: Any = None
        """Event behind the last copy; None if all copies are complete."""

    def copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self._on_gpu(tensor):
            return tensor.to("cpu", copy=True)
        try:
            pinned = self._empty_like(tensor)
        except RuntimeError:  # so much memory cannot be page-locked
            return tensor.to("cpu", copy=True)
        self._device = tensor.device
        return pinned.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Record the event behind the last copy; called by the thread that has begun the copies."""
        if self._device is not None:
            self._copied = self._event()
            self._copied.record()

    def wait(self) -> None:
        """Wait until all copies are complete; any thread may call it."""
        if self._copied is None:
            return
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts on GPU 0, and would create a context there
        self._copied.synchronize()


class GatheredTensors(HostTensors):
    """Tensors that were copied for the checkpoint alone, when they were gathered from all ranks."""

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


def copy_to_cpu(state: Any, tensors: HostTensors | None = None) -> Any:
    """Return the state with every tensor copied to the CPU and containers as plain lists, tuples and dicts.

    Tensors that share all of their memory, such as tied weights, share it in the copy too; a view of a part of a larger
    tensor is copied alone.

    Raises:
        CheckpointError: ``torch.load(..., weights_only=True)`` could not load a value of the state.
    """
    copies = tensors or HostTensors()
    copied = _copy(state, "state", {}, copies)
    copies.close()
    if tensors is None:
        copies.wait()
    return copied


def _copy(state: Any, where: str, seen: dict[tuple[Any, ...], Tensor], tensors: HostTensors) -> Any:
    if state is None:
        return state
    if isinstance(state, bytes) and not state:
        raise CheckpointError(f"{where} is empty bytes, which torch does not load with weights_only=True")
    for plain in _PLAIN:
        if isinstance(state, plain):
            return plain(state)  # weights_only=True loads no enum and no numpy scalar
    if isinstance(state, Tensor) and state.layout is torch.strided:
        # Empty tensors all have address 0.
        key = (state.device, state.data_ptr() or id(state), state.dtype, tuple(state.shape), state.stride())
        if key not in seen:
            seen[key] = tensors.copy(state)
        return seen[key]
    if isinstance(state, Mapping):
        return {_key(key, where): _copy(value, f"{where}[{key!r}]", seen, tensors) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value, f"{where}[{index}]", seen, tensors) for index, value in enumerate(state)]
    if isinstance(state, tuple):
        return tuple(_copy(value, f"{where}[{index}]", seen, tensors) for index, value in enumerate(state))
    kind = type(state)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds dense tensors, numbers, strings, "
        "lists, tuples and dicts"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float | bool | tuple):
        return key
    raise CheckpointError(f"{where} has the key {key!r}: a checkpoint's keys are strings, numbers or tuples of them")


def capture_rng() -> dict[str, Any]:
    """Return the states of the random generators of Python, torch's CPU, this rank's GPU, and numpy if imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [
            str(kind),
            torch.tensor(keys.tolist(), dtype=torch.int64),
            *(plain(each) for plain, each in zip((int, int, float), rest, strict=True)),
        ]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore captured states of random generators; those of a GPU and numpy are ignored if not in use."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.tolist(), position, has_gauss, gauss))


ENTRIES = "entries"
"""Key of the list in a checkpoint."""


def kinds(state: Any, where: str = "") -> dict[str, str]:
    """Return the type of every entry by its path: ``{"model['0.bias']": "float32 [16]", "updates": "int"}``.

    A checkpoint keeps this list beside the state. Without it, a parameter that never had a gradient, and so has no
    moments, could not be distinguished from one whose moments are lost.
    """
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
