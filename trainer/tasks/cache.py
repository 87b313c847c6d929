"""Disk cache of prepared text: built once, memory-mapped by every rank and every later run.

An entry is a folder named by a hash of its inputs. It is renamed into place, so a reader sees all of it or nothing,
and a file lock makes the ranks of a node wait for the first one instead of building it again. The cache may be deleted
while no run is starting.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.contract.home_folder import cache_folder


def fingerprint(files: Sequence[Path]) -> list[list[Any]]:
    """Identify files without reading them: path, size in bytes, and modification time in nanoseconds."""
    return [[str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


def entry(kind: str, inputs: Any, build: Callable[[Path], None]) -> Path:
    """Return the folder of a cache entry; ``build`` fills an empty one first if it does not exist.

    ``kind`` names the layout and its version; ``inputs`` are JSON values that determine the content.

    Raises:
        RequestError: the cache cannot be written.
    """
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]
    root = cache_folder()
    final = root / f"{kind}-{digest}"
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{final.name}.lock"):
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        raise RequestError(
            f"the text cache {root} cannot be written: {error.strerror or error}; GPUTRAIN_CACHE names another folder"
        ) from error
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{final.name}.", suffix=".tmp", dir=final.parent))
    try:
        build(scratch)
        scratch.rename(final)
    except OSError:
        # Without working locks (some network file systems) another rank may have been first: its entry is equal.
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, and remove it afterwards."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                yield  # this file system has no locks; the rename alone keeps entries whole
                return
            if not _still_there(descriptor, path):
                continue  # its last holder removed the file that this process was waiting for
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def mapped(path: Path, dtype: torch.dtype) -> Tensor:
    """Map a file of numbers into memory as a tensor ``[N]``, privately and without reading it."""
    count = path.stat().st_size // dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
