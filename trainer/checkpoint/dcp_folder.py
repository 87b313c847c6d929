"""Read tensors from a folder of ``torch.distributed.checkpoint`` (DCP), in one process.

A folder has ``.metadata``, a pickle, and files of shards, in which each part of a tensor is a file of ``torch.save``.
torch's own reader unpickles ``.metadata`` without restriction, so a stranger's folder could run any code, and leaves
the part of a tensor that no shard covers as it was in memory. Here the pickle can make nothing but the records below,
and a tensor is whole, with the checksums of its parts, or refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.checkpoint.reader import naming_the_file, reason_of
from trainer.contract.errors import CheckpointError
from trainer.contract.record.checkpoints import DCP_METADATA

_CHUNK = 1 << 22
"""Bytes read at once."""
Key = tuple[str | int, ...]
"""Keys that lead to a tensor in the nested state that was saved, such as ``("model", "0.weight")``."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rectangular part of a tensor, and its place in a file."""

    offsets: tuple[int, ...]
    """First index of each dimension."""
    sizes: tuple[int, ...]
    file: str
    """Name of the file in the folder."""
    start: int
    """First byte in the file."""
    length: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of a folder; its parts cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def read_metadata(folder: Path, wanted: Callable[[Key], bool]) -> dict[Key, SavedTensor]:
    """Return the wanted tensors of a folder by their keys.

    Raises:
        CheckpointError: ``.metadata`` is missing, damaged, or holds something else than a description of tensors.
    """
    path = folder / DCP_METADATA
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {DCP_METADATA}, which is written last: it was not saved to the end")
    with naming_the_file(path, "is damaged"), path.open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
        except _ForeignNameError as error:
            raise CheckpointError(
                f"{path}: names {error}, which does not belong in it; as a pickle it could run code, so it is not "
                "loaded"
            ) from None
    try:
        return _tensors_of(metadata, wanted)
    except _MalformedError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: is damaged: {reason_of(error)}") from None


def require_files(folder: Path, tensors: Iterable[SavedTensor]) -> None:
    """Require that the files of some tensors are there in full length.

    Raises:
        CheckpointError: one is missing or too short.
    """
    ends: dict[str, int] = {}
    for part in (part for tensor in tensors for part in tensor.parts):
        ends[part.file] = max(ends.get(part.file, 0), part.start + part.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path}: {problem}, but {DCP_METADATA} names it: the checkpoint is incomplete")
        if (size := path.stat().st_size) < end:
            raise CheckpointError(f"{path}: has {size:,} bytes of at least {end:,}: the checkpoint is incomplete")


def read_tensor(folder: Path, name: str, saved: SavedTensor) -> Tensor:
    """Return a tensor, on the CPU; besides it, one of its parts is in memory at a time.

    Raises:
        CheckpointError: a part cannot be read, or is not as ``.metadata`` describes it.
    """
    whole: Tensor | None = None
    for part in saved.parts:
        piece = _read_part(folder / part.file, name, part, saved.dtype)
        if part.sizes == saved.shape:
            return piece
        if whole is None:
            whole = torch.empty(saved.shape, dtype=saved.dtype)
        whole[tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))] = piece
    return torch.empty(saved.shape, dtype=saved.dtype) if whole is None else whole  # without parts it has no element


def _read_part(path: Path, name: str, part: Part, dtype: torch.dtype) -> Tensor:
    with naming_the_file(path, f"is damaged: {name} cannot be loaded"), path.open("rb") as file:
        section: Any = _Section(file, part.start, part.length)
        _require_checksums(section)
        section.seek(0)
        piece = torch.load(section, map_location="cpu", weights_only=True)
    if not isinstance(piece, Tensor) or piece.dtype != dtype or tuple(piece.shape) != part.sizes:
        is_now = f"{piece.dtype} {list(piece.shape)}" if isinstance(piece, Tensor) else type(piece).__name__
        raise CheckpointError(
            f"{path}: has {is_now} for {name}, but {DCP_METADATA} describes {dtype} {list(part.sizes)}: "
            "they are of two saves"
        )
    return piece.detach()


def _require_checksums(archive: BinaryIO) -> None:
    """Compare the content of an archive of ``torch.save`` with its checksums, which torch does not."""
    with zipfile.ZipFile(archive) as entries:
        # torch.serialization.set_crc32_options(False) leaves them 0.
        for entry in (entry for entry in entries.infolist() if entry.CRC):
            with entries.open(entry) as content:  # raises BadZipFile at the end of an entry
                while content.read(_CHUNK):
                    pass


class _Section(io.RawIOBase):
    """Section of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as memory, memory.cast("B") as view:  # released: torch frees the buffer at once
            count = max(0, min(len(view), self._length - self._at))
            self._file.seek(self._start + self._at)
            with view[:count] as place:
                read = self._file.readinto(place)  # type: ignore[attr-defined]  # of a file opened as binary
        self._at += read
        return int(read)


# --------------------------------------------------------------------------------------------- what the pickle may make


class _ForeignNameError(Exception):
    """The pickle names a class or function that it may not use."""


class _MalformedError(Exception):
    """The metadata contradicts itself."""


class _Record:
    """Stands for an instance of a class of DCP: its fields as attributes, and no methods."""


class _Metadata(_Record):
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: Any = None


class _TensorMetadata(_Record):
    properties: _Properties
    size: Sequence[int]
    chunks: list[_Chunk]


class _Chunk(_Record):
    offsets: Sequence[int]
    sizes: Sequence[int]


class _Properties(_Record):
    dtype: torch.dtype

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _Bytes(_Record):
    """Something else than a tensor, which is not read."""


@dataclass(frozen=True)
class _Index(_Record):
    fqn: str = ""
    offset: tuple[int, ...] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        offset = state.get("offset")
        object.__setattr__(self, "fqn", state["fqn"])
        object.__setattr__(self, "offset", None if offset is None else tuple(offset))


class _Storage(_Record):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


def _unused(*_: Any) -> None:
    """Stands for a call whose result is not needed."""


_DCP = "torch.distributed.checkpoint."
_NAMES: Mapping[tuple[str, str], Callable[..., Any]] = {
    (f"{_DCP}metadata", "Metadata"): _Metadata,
    (f"{_DCP}metadata", "TensorStorageMetadata"): _TensorMetadata,
    (f"{_DCP}metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}metadata", "TensorProperties"): _Properties,
    (f"{_DCP}metadata", "MetadataIndex"): _Index,
    (f"{_DCP}metadata", "StorageMeta"): _Record,
    (f"{_DCP}filesystem", "_StorageInfo"): _Storage,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _unused,
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"): _unused,
    ("builtins", "getattr"): _unused,  # Python 3.11 names a member of an enum by it
    ("pathlib", "PosixPath"): _unused,  # the folder to which it was saved
    ("pathlib", "Path"): _unused,
    ("pathlib._local", "PosixPath"): _unused,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (known := _NAMES.get((module, name))) is not None:
            return known
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise _ForeignNameError(f"{module}.{name}")


# -------------------------------------------------------------------------------------------------- what it describes


def _tensors_of(metadata: Any, wanted: Callable[[Key], bool]) -> dict[Key, SavedTensor]:
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.storage_data, dict):
        raise _MalformedError("is no metadata of DCP's files")
    keys = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        key = tuple(keys.get(name, (name,)))  # without keys the state was saved as it was, by flat names
        if isinstance(entry, _TensorMetadata) and wanted(key):
            tensors[key] = _saved(str(name), entry, metadata.storage_data)
    return tensors


def _saved(name: str, entry: _TensorMetadata, storage: Mapping[Any, Any]) -> SavedTensor:
    shape, dtype = _sizes(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise _MalformedError(f"is damaged: {name} has no dtype")
    parts = [
        _part(name, chunk, storage) for chunk in entry.chunks if math.prod(_sizes(chunk.sizes)) or not math.prod(shape)
    ]
    _require_cover(name, shape, parts)
    return SavedTensor(dtype=dtype, shape=shape, parts=tuple(parts))


def _part(name: str, chunk: _Chunk, storage: Mapping[Any, Any]) -> Part:
    offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
    info = storage.get(_Index(name, offsets))
    if not isinstance(info, _Storage):
        raise _MalformedError(f"names no file for a part of {name}: the checkpoint is incomplete")
    if info.transform_descriptors:
        raise _MalformedError(f"{name} is saved as {', '.join(info.transform_descriptors)}, which is not read")
    if Path(info.relative_path).name != info.relative_path:
        raise _MalformedError(f"{name} is in {info.relative_path!r}, which is no file of this folder")
    start, length = _sizes((info.offset, info.length))
    return Part(offsets=offsets, sizes=sizes, file=info.relative_path, start=start, length=length)


def _sizes(numbers: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _MalformedError(f"is damaged: {tuple(numbers)!r} are no sizes")
    return tuple(numbers)


def _require_cover(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    """Require that the parts are within a tensor, do not overlap, and have as many elements as it has."""
    ordered = sorted(parts, key=lambda part: part.offsets)
    for index, part in enumerate(ordered):
        within = len(part.offsets) == len(part.sizes) == len(shape) and all(
            start + size <= whole for start, size, whole in zip(part.offsets, part.sizes, shape, strict=True)
        )
        if not within:
            raise _MalformedError(f"is damaged: a part of {name} is outside its shape {list(shape)}")
        for other in ordered[index + 1 :]:
            if other.offsets[:1] and other.offsets[0] >= part.offsets[0] + part.sizes[0]:
                break  # so are all that follow
            if _overlap(part, other):
                raise _MalformedError(f"is damaged: two parts of {name} overlap")
    missing = math.prod(shape) - sum(math.prod(part.sizes) for part in parts)
    if missing:
        raise _MalformedError(f"describes no part for {missing:,} elements of {name}: the checkpoint is incomplete")


def _overlap(one: Part, other: Part) -> bool:
    return all(
        max(first, second) < min(first + size, second + extent)
        for first, size, second, extent in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
