"""Write weights as a safetensors file, which other programs read without torch and without running any code.

Format: a JSON header, then the bytes of each tensor (https://huggingface.co/docs/safetensors). Names cannot share
bytes, so tied weights are written under each of their names, and a strict ``load_state_dict`` accepts the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, TensorSpec, serialize_file
from torch import Tensor

from trainer.contract.errors import RequestError

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the message of an operating system error in safetensors, which is written in Rust."""


def write_safetensors(path: Path, weights: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> int:
    """Write tensors under a temporary name, sync the file and rename it; return its size in bytes.

    Raises:
        OSError: the file could not be written; nothing of it remains, and an existing file at ``path`` is unchanged.
        RequestError: the format does not support the dtype of a tensor.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _serialize(temporary, weights, metadata)
        with temporary.open("rb+") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # safetensors creates it readable by its owner only
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return size


def _serialize(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    # Keeps the memory alive while it is written.
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        specs = {
            name: TensorSpec(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                data_ptr=tensor.data_ptr(),
                data_len=tensor.nbytes,
            )
            for name, tensor in dense.items()
        }
        serialize_file(specs, path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        if match := _OS_ERROR.search(str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        raise RequestError(f"safetensors: {error}") from None


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
