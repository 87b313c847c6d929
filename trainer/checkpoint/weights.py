"""Weights of a model: of a checkpoint, or of a file in another format that holds them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from trainer.checkpoint.file import has_trailer
from trainer.checkpoint.reader import load, load_plain
from trainer.contract.errors import CheckpointError

_WITHIN = ("model", "state_dict", "model_state_dict")
"""Keys of the weights in checkpoints of this package, fairseq, Lightning and torch's tutorials."""
_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to every name."""


def weights_of(state: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return the model's ``state_dict`` in a checkpoint's state: parameters and buffers by name.

    Raises:
        CheckpointError: the checkpoint has no weights.
    """
    weights = state.get("model")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{source}: entry model is missing, or is not a dict of tensors")
    return weights


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the weights in a file, by name: a checkpoint, a bare ``state_dict``, or ``.safetensors``.

    Raises:
        CheckpointError: the file cannot be read, or has no weights.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        content: Any = _load_safetensors(path)
    else:
        content = load(path) if has_trailer(path) else load_plain(path)
    for entry in _WITHIN:
        if isinstance(content, Mapping) and isinstance(content.get(entry), Mapping):
            content = content[entry]
            break
    weights = {str(name): value for name, value in content.items()} if isinstance(content, Mapping) else {}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: holds no dict of named tensors, at the top level or under {', '.join(_WITHIN)}")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def exported_task_state(path: Path) -> dict[str, Any]:
    """Return the entries ``task`` and ``task_state`` in the metadata of exported weights, as far as they are there."""
    with _safetensors(path) as file:
        metadata = file.metadata() or {}
    entries: dict[str, Any] = {"task": metadata.get("task")}
    try:
        entries["task_state"] = msgspec.json.decode(metadata.get("task_state", "null"))
    except msgspec.DecodeError:
        raise CheckpointError(f"{path}: its metadata task_state is not JSON") from None
    return entries


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    with _safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(f"{path}: needs the package safetensors, which is not installed here") from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be loaded: {error}") from None


def fit(weights: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the weights that fit a model by name and shape, and a description of the differences; empty if none."""
    shapes = {name: list(value.shape) for name, value in model.items() if isinstance(value, Tensor)}
    fitting = {name: value for name, value in weights.items() if shapes.get(name) == list(value.shape)}
    missing = [name for name in shapes if name not in weights]
    unexpected = [name for name in weights if name not in shapes]
    reshaped = [
        f"{name} is {list(value.shape)} instead of {shapes[name]}"
        for name, value in weights.items()
        if name in shapes and name not in fitting
    ]
    parts = [("missing", missing), ("unexpected", unexpected), ("different shape", reshaped)]
    return fitting, "; ".join(f"{difference}: {_some(names)}" for difference, names in parts if names)


def _some(names: list[str]) -> str:
    max_names = 5  # maximum names per difference in a message; a model may have hundreds
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
