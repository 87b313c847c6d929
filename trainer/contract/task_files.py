"""Files that a task reads: found by name, pattern or folder, refused if missing or unreadable."""

from __future__ import annotations

import glob
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.contract.errors import MachineNotReadyError, RequestError, nearest
from trainer.contract.home_folder import expand_home

STDLIB = "stdlib"
"""Value of ``data`` for the source of Python's standard library; a folder of that name is written ``./stdlib``."""


@contextmanager
def refuse_unreadable(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` about a file into a ``RequestError``."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error


def require_package(name: str, *, needed_by: str, install: str) -> None:
    """Raise MachineNotReadyError if a package is not installed here; ``install`` is what ``pip install`` gets."""
    if importlib.util.find_spec(name) is None:
        raise MachineNotReadyError(f"{needed_by} needs the package {name}: pip install {install}")


def require_tokenizers(needed_by: str) -> None:
    """Raise MachineNotReadyError if the package ``tokenizers`` is not installed here."""
    require_package("tokenizers", needed_by=needed_by, install="'gputrain[tokenizers]'")


def require_file(name: str) -> Path:
    """Return the path of a file, with ``~`` expanded.

    Raises:
        RequestError: the file is missing, unreadable, empty or a folder.
    """
    path = expand_home(name)
    if not path.exists():
        raise RequestError(f"{path} does not exist{_nearest_file(path)}")
    if path.is_dir():
        raise RequestError(f"{path} is a folder, but must be a file")
    with refuse_unreadable(path), path.open("rb") as file:
        if not file.read(1):
            raise RequestError(f"{path} is empty")
    return path


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor does the folder {path.parent}; working directory: {Path.cwd()})"
    with refuse_unreadable(path.parent):
        return nearest(path.name, (entry.name for entry in path.parent.iterdir()))


def text_files(data: str, pattern: Sequence[str]) -> list[Path]:
    """Return the files of ``data``, in an order equal on every machine.

    Raises:
        RequestError: no file exists or matches, one is unreadable, or all are empty.
    """
    if data == STDLIB:
        # Only the top level: its packages hold tests and generated tables, which are no text to learn from.
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
        where = f"the standard library in {folder}"
    elif glob.has_magic(data) and not Path(data).exists():
        names = glob.glob(str(expand_home(data)), recursive=True)  # noqa: PTH207 - a pattern, not a folder's
        files = sorted(Path(name) for name in names if not Path(name).is_dir())
        where = f"the pattern {data}"
    else:
        path = expand_home(data)
        if not path.is_dir():
            return [require_file(data)]
        with refuse_unreadable(path):
            files = sorted({file for one in pattern for file in path.rglob(one) if _is_visible(file, path)})
        where = f"the folder {path}"
        if not files:
            raise RequestError(f"{where} has no file that matches {', '.join(pattern)}; name others with pattern")
    if not files:
        raise RequestError(f"{where} matches no file")
    for file in files:
        if not os.access(file, os.R_OK):
            raise RequestError(f"{file} cannot be read: Permission denied")
    if not any(file.stat().st_size for file in files):
        raise RequestError(f"{where} has only empty files")
    return files


def _is_visible(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)


def idx_file(folder: Path, name: str) -> Path:
    """Return the path of an IDX file of MNIST, compressed or not.

    Raises:
        RequestError: the file is in none of the folders that downloads use.
    """
    folder = expand_home(folder)
    if not folder.exists():
        raise RequestError(f"{folder} does not exist{_nearest_file(folder)}")
    if not folder.is_dir():
        raise RequestError(f"{folder} is a file, but must be the folder of MNIST's IDX files")
    for parent in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for spelling in (name, name.replace("-idx", ".idx")):
            for path in (parent / spelling, parent / f"{spelling}.gz"):
                if path.is_file():
                    return path
    raise RequestError(f"{folder} lacks {name} (or {name}.gz)")
