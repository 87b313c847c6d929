"""Write a file or a folder that a person has named: whole, or not at all, and over another one only when asked."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainer.contract.errors import RequestError


class OutputError(RuntimeError):
    """The output could not be written, and nothing is left of it; the message is one line."""


def require_place(output: Path, *, force: bool) -> None:
    """Refuse a place at which no file may be written.

    Raises:
        RequestError: one line about why.
    """
    if output.is_dir():
        raise RequestError(f"{output} is a folder: name a file in it")
    if output.exists() and not output.is_file():
        raise RequestError(f"{output} is no regular file, and is not replaced by one")
    if output.exists() and not force:
        raise RequestError(f"{output} is there already: replace it with --force, or name another file")
    _require_parent(output)


def require_folder_place(output: Path, *, force: bool, prefix: str) -> None:
    """Refuse a place at which no folder may be written; only one that holds files of one kind alone is replaced.

    Args:
        output: the folder.
        force: whether one that is there may be replaced.
        prefix: that all files of a folder have which may be replaced.

    Raises:
        RequestError: one line about why.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise RequestError(f"{output} is no folder, and is not replaced by one")
    held = [path for path in output.rglob("*") if path.is_symlink() or not path.is_dir()] if output.exists() else []
    if held and not force:
        raise RequestError(f"{output} is there already: replace it with --force, or name another folder")
    if other := next((path for path in held if not path.name.startswith(prefix)), None):
        raise RequestError(f"{output} holds other files, such as {other.relative_to(output)}: name another folder")
    _require_parent(output)


def _require_parent(output: Path) -> None:
    if not output.parent.is_dir():
        raise RequestError(f"{output}: there is no folder {output.parent}")


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, sync it and give it its name; on any failure nothing is left of it.

    Raises:
        OutputError: it could not be written; a file of that name is as it was.
    """
    temporary = _temporary(path)
    try:
        with _explaining(path, temporary):
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name and give it its name; on any failure nothing is left of it.

    Raises:
        OutputError: it could not be written; a folder of that name is as it was.
    """
    temporary, before = _temporary(path), path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        with _explaining(path, temporary):
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
def _explaining(path: Path, temporary: Path) -> Iterator[None]:
    """Turn what fails in writing, which names the temporary file or none, into an error that names the output."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(temporary)):
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        raise
