"""Weights of a model: of a checkpoint, or of a file in another format that holds them by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.checkpoint.dcp_folder import Key, read_metadata, read_tensor, require_files
from trainer.checkpoint.file import has_trailer
from trainer.checkpoint.reader import load, load_plain
from trainer.contract.errors import CheckpointError, listed
from trainer.contract.record.checkpoints import is_dcp_folder

_WITHIN = ("model", "state_dict", "model_state_dict", "module")
"""Keys of the weights in checkpoints of this package, fairseq, Lightning, torch's tutorials and DeepSpeed."""
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


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights by name, of a file or a folder that may have them on disk only."""

    tensors: dict[str, Tensor]
    """On the device ``meta``, which takes no memory, where they are on disk only."""
    read: Callable[[Collection[str]], dict[str, Tensor]] | None = None
    """Function that reads those of these names; None where all are in memory."""

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of these names, on the CPU.

        Raises:
            CheckpointError: one cannot be read.
        """
        return {name: self.tensors[name] for name in names} if self.read is None else self.read(list(names))


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Return all weights of a file or folder that ``open_weights`` reads, by name."""
    weights = open_weights(path)
    return weights.load(weights.tensors)


def open_weights(path: Path | str, *, model: Collection[str] = ()) -> Weights:
    """Open the weights in a checkpoint, a bare ``state_dict``, ``.safetensors``, or a folder of DCP.

    Args:
        path: of a file, or of a folder that ``torch.distributed.checkpoint`` (DCP) has written.
        model: names of the weights of a model, by which they are told from other tensors of a folder.

    Raises:
        CheckpointError: it cannot be read, or has no weights.
    """
    path = Path(path)
    if is_dcp_folder(path):
        return _open_folder(path, model)
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
    return Weights(tensors=_without_prefix(weights))


def _without_prefix(weights: dict[str, Any]) -> dict[str, Any]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _open_folder(folder: Path, model: Collection[str]) -> Weights:
    """Open the weights of a DCP folder: of its entries, or of its top level, those that have most names of the model.

    Without a common name the top level counts as the weights only if no entry does: it may hold other tensors.
    """
    by_entry: dict[Key, dict[str, Any]] = {}
    for key, saved in read_metadata(folder, _may_be_weight).items():
        by_entry.setdefault(key[:-1], {})[str(key[-1])] = saved
    if not by_entry:
        raise CheckpointError(f"{folder}: holds no named tensors, at the top level or under {', '.join(_WITHIN)}")
    entries = {entry: _without_prefix(tensors) for entry, tensors in by_entry.items()}
    known = {entry: sum(name in tensors for name in model) for entry, tensors in entries.items()}
    if not any(known.values()):
        known = {entry: int(bool(entry)) for entry in entries}
    best = [entry for entry in entries if known[entry] == max(known.values())]
    if len(best) > 1:
        names = ", ".join(".".join(map(str, entry)) or "the top level" for entry in best)
        raise CheckpointError(f"{folder}: holds weights at several places, {names}: save those to be read alone")
    saved_weights = entries[best[0]]

    def read(names: Collection[str]) -> dict[str, Tensor]:
        require_files(folder, (saved_weights[name] for name in names))
        return {name: read_tensor(folder, name, saved_weights[name]) for name in names}

    shapes = {name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in saved_weights.items()}
    return Weights(tensors=shapes, read=read)


def _may_be_weight(key: Key) -> bool:
    """Return whether a tensor of a folder is at the top level, or within an entry that holds a model's weights."""
    return len(key) == 1 or key[-2] in _WITHIN


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
    return fitting, "; ".join(f"{difference}: {listed(names)}" for difference, names in parts if names)
