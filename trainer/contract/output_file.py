"""Output files and folders that a person has named: written whole or not at all, replacing others only with --force."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainer.contract.errors import RequestError
from trainer.contract.record.run_dir import replacing


class OutputError(RuntimeError):
    """The output could not be written and was removed; the message is one line."""


def require_place(output: Path, *, force: bool) -> None:
    """Check that a file may be written at a path.

    Raises:
        RequestError: the path is taken, or its folder is missing.
    """
    if output.is_dir():
        raise RequestError(f"{output} is a folder: name a file in it")
    if output.exists() and not output.is_file():
        raise RequestError(f"{output} is not a regular file and will not be replaced")
    if output.exists() and not force:
        raise RequestError(f"{output} already exists: replace it with --force, or name another file")
    _require_parent(output)


def require_folder_place(output: Path, *, force: bool, prefix: str | tuple[str, ...]) -> None:
    """Check that a folder may be written at a path: empty, or with ``force`` one that holds only our own files.

    Raises:
        RequestError: the path is taken, or its parent folder is missing.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise RequestError(f"{output} is not a folder and will not be replaced")
    held = [path for path in output.rglob("*") if path.is_symlink() or not path.is_dir()] if output.exists() else []
    if held and not force:
        raise RequestError(f"{output} already exists: replace it with --force, or name another folder")
    if other := next((path for path in held if not path.name.startswith(prefix)), None):
        raise RequestError(f"{output} holds other files, such as {other.relative_to(output)}: name another folder")
    _require_parent(output)


def _require_parent(output: Path) -> None:
    if not output.parent.is_dir():
        raise RequestError(f"{output}: there is no folder {output.parent}")


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, then sync it and rename it to ``path``; on any failure delete it.

    Raises:
        OutputError: the file could not be written; an existing file of that name is unchanged.
    """
    temporary = _temporary(path)
    with _errors_naming(path, temporary), replacing(path, temporary) as file:
        yield file


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, then rename it to ``path``; on any failure delete it.

    Raises:
        OutputError: the folder could not be written; an existing folder of that name is unchanged.
    """
    temporary, before = _temporary(path), path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        with _errors_naming(path, temporary):
            temporary.mkdir()
            yield temporary
            if path.exists():
                path.rename(before)
            temporary.rename(path)
    except BaseException:
        if before.exists() and not path.exists():
            before.rename(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def _errors_naming(path: Path, temporary: Path) -> Iterator[None]:
    """Turn an ``OSError`` that names the temporary file, or no file, into an ``OutputError`` that names the output."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(temporary)):
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        raise
