"""Encode plain data and tensors as bytes for collectives, and decode them.

No pickle: decoding bytes of a foreign process builds values and never runs code.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.errors import TrainingError

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
"""Supported dtypes by their encoded name."""

ALIGNMENT = 16
"""Tensor offsets are multiples of this many bytes: the size of the largest item, complex128."""

_SIZE_BYTES = 8
"""Length of the header, which holds the size of the tree."""
_SCALARS: tuple[type, ...] = (float, str, bytes)
_CONTAINERS: dict[str, type[Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_INT64 = range(-(2**63), 2**63)


def encode(data: Any) -> Tensor:
    """Return the data as ``[bytes]`` of uint8 on the CPU.

    The layout is the size of the tree (8 bytes, little-endian), the tree in MessagePack, then each tensor's raw
    bytes. The tree holds scalars as they are, a container as a list that begins with its kind, and a tensor as dtype,
    shape and offset. Values of derived types are sent as plain ones.

    Raises:
        TypeError: a value is not None, a number, string, bytes, list, tuple, set, dict or dense tensor.
    """
    tensors: list[Tensor] = []
    tree = msgspec.msgpack.encode(_to_tree(data, tensors, [0]))
    head = len(tree).to_bytes(_SIZE_BYTES, "little") + tree
    pieces = [torch.frombuffer(bytearray(head + bytes(-len(head) % ALIGNMENT)), dtype=torch.uint8)]
    for tensor in tensors:
        pieces.append(tensor)
        if padding := -tensor.numel() % ALIGNMENT:
            pieces.append(torch.zeros(padding, dtype=torch.uint8))
    return torch.cat(pieces)


def decode(data: Tensor) -> Any:
    """Rebuild the data from the bytes of ``encode``; tensors are on the CPU and share no memory with ``data``."""
    data = data.cpu()
    size = int.from_bytes(to_bytes(data[:_SIZE_BYTES]), "little")
    begin = _SIZE_BYTES + size
    begin += -begin % ALIGNMENT
    try:
        return _from_tree(msgspec.msgpack.decode(to_bytes(data[_SIZE_BYTES : _SIZE_BYTES + size])), data[begin:])
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise TrainingError(f"another rank's message cannot be read: {error}") from error


def to_bytes(data: Tensor) -> bytes:
    """Return uint8 ``[n]`` as bytes, without numpy."""
    buffer = bytearray(data.numel())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(data)
    return bytes(buffer)


def _to_tree(data: Any, tensors: list[Tensor], end: list[int]) -> Any:
    """Return the tree of ``data`` and append its tensors' bytes; ``end[0]`` is the offset of the next tensor."""
    if data is None or isinstance(data, bool):
        return data
    for scalar in _SCALARS:
        if isinstance(data, scalar):
            return scalar(data)  # MessagePack takes no derived type, such as a scalar of numpy or torch's version
    if isinstance(data, int):
        number = int(data)
        return number if number in _INT64 else ["i", str(number)]
    if isinstance(data, Tensor):
        return _to_leaf(data, tensors, end)
    for name, container in _CONTAINERS.items():
        if isinstance(data, container):
            return [name, *(_to_tree(item, tensors, end) for item in data)]
    if isinstance(data, dict):
        pairs = (_to_tree(part, tensors, end) for pair in data.items() for part in pair)
        return ["d", *pairs]
    kind = type(data)
    raise TypeError(f"ranks exchange plain data and tensors, not {kind.__module__}.{kind.__qualname__}")


def _to_leaf(tensor: Tensor, tensors: list[Tensor], end: list[int]) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"ranks exchange dense tensors of {', '.join(DTYPES)}, not {tensor.dtype} {tensor.layout}")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    offset = end[0]
    tensors.append(flat)
    end[0] += flat.numel() + -flat.numel() % ALIGNMENT
    return ["T", name, offset, *tensor.shape]


def _from_tree(tree: Any, data: Tensor) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]([_from_tree(item, data) for item in rest])
    if kind == "d":
        parts = [_from_tree(part, data) for part in rest]
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if kind == "i":
        return int(rest[0])
    if kind != "T":
        raise ValueError(f"unknown kind {kind!r}")
    name, offset, *shape = rest
    dtype = DTYPES[name]
    values = torch.empty(shape, dtype=dtype)
    size = values.numel() * dtype.itemsize
    if not 0 <= offset <= offset + size <= data.numel():
        raise ValueError("a tensor reaches beyond the end")
    values.view(-1).view(torch.uint8).copy_(data[offset : offset + size])
    return values
