"""Files that a task reads: found by name, pattern or folder, refused if missing or unreadable."""

from __future__ import annotations

import glob
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import MachineNotReadyError, RequestError, nearest, quoted
from trainer.contract.home_folder import expand_home
from trainer.contract.options import Training

TEXT_NAMES = ("sentence", "text", "utterance", "review", "phrase")
"""Usual names of the column of the sentences."""
LABEL_NAMES = ("label", "labels", "doc_label", "class", "category", "sentiment", "target")
"""Usual names of the column of the labels."""
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


def require_optimizer(options: Training) -> None:
    """Raise MachineNotReadyError if the package of the optimizer that trains is not installed here."""
    if options.optimizer == "schedulefree_adamw" and not options.eval_only:
        require_package("schedulefree", needed_by=f"optimizer {options.optimizer}", install="schedulefree")


def require_file(name: str) -> Path:
    """Return the path of a file, with ``~`` expanded.

    Raises:
        MachineNotReadyError: the file is missing.
        RequestError: it is unreadable, empty or a folder.
    """
    path = expand_home(name)
    if not path.exists():
        raise MachineNotReadyError(f"{path} does not exist{nearest_file(path)}")
    if path.is_dir():
        raise RequestError(f"{path} is a folder, but must be a file")
    with refuse_unreadable(path), path.open("rb") as file:
        if not file.read(1):
            raise RequestError(f"{path} is empty")
    return path


@dataclass(frozen=True, kw_only=True)
class SavedDataset:
    """Folder that Hugging Face's package ``datasets`` saved, with the columns of its ``dataset_info.json``."""

    folder: Path
    features: Mapping[str, Any]
    """Description of each column, by its name."""

    def columns(self, text: str | None, label: str | None) -> tuple[str, str]:
        """Return the columns of text and label, given by name or number, else by their usual names."""
        return self.text_column(text), self._column("label", label, LABEL_NAMES)

    def text_column(self, wanted: str | None) -> str:
        """Return the column of the text, given by name or number, else by its usual names; refuse another type."""
        column = self._column("text", wanted, TEXT_NAMES)
        feature = self.features[column]
        if not (isinstance(feature, Mapping) and feature.get("dtype") in ("string", "large_string")):
            raise RequestError(f"{self.folder}: column {quoted(column)} does not hold text")
        return column

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes of a ``ClassLabel``; None if the column holds the labels themselves."""
        feature = self.features[column]
        names = feature.get("names") if isinstance(feature, Mapping) else None
        return names if isinstance(names, list) else None

    def _column(self, kind: str, wanted: str | None, usual: Sequence[str]) -> str:
        names = list(self.features)
        known = ", ".join(map(quoted, names[:10])) + (", …" if len(names) > 10 else "")
        if wanted is not None:
            if wanted.isdecimal() and wanted not in names and int(wanted) < len(names):
                return names[int(wanted)]
            if wanted not in names:
                guess = nearest(wanted, names)
                raise RequestError(f"{self.folder}: there is no column {quoted(wanted)}, but {known}{guess}")
            return wanted
        found = [name for name in names if name.lower() in usual]
        if not found:
            raise RequestError(
                f"{self.folder}: the column of the {kind} is unknown: set {kind}_column to one of {known}"
            )
        return found[0]


def saved_dataset(name: str) -> SavedDataset | None:
    """Return the dataset of a folder that Hugging Face's package ``datasets`` saved; None for any other path.

    Raises:
        RequestError: the folder holds several splits, or is damaged.
        MachineNotReadyError: the package is not installed here.
    """
    folder = expand_home(name)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.parent.name for entry in folder.glob("*/state.json"))
        known = f", such as {folder / splits[0]}; there are {', '.join(splits)}" if splits else ""
        raise RequestError(f"{folder} holds the splits of a dataset: name the folder of one{known}")
    info = folder / "dataset_info.json"
    if not (info.is_file() and (folder / "state.json").is_file()):
        return None
    require_package("datasets", needed_by=str(folder), install="datasets")
    with refuse_unreadable(info):
        content = info.read_bytes()
    try:
        features = msgspec.json.decode(content, type=dict[str, Any])["features"]
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
        raise RequestError(f"{info} does not name the columns of a dataset: {error}") from None
    if not isinstance(features, dict):
        raise RequestError(f"{info} does not name the columns of a dataset")
    return SavedDataset(folder=folder, features=features)


def nearest_file(path: Path) -> str:
    """Return a hint at a file of the same folder with a similar name, or that there is no such folder."""
    if not path.parent.is_dir():
        relative = f"it is relative to the working directory, {Path.cwd()}"
        advice = "check the path" if path.is_absolute() else relative
        return f", nor does the folder {path.parent}; {advice}"
    with refuse_unreadable(path.parent):
        return nearest(path.name, (entry.name for entry in path.parent.iterdir()))


def text_files(data: str, pattern: Sequence[str]) -> list[Path]:
    """Return the files of ``data``, in an order equal on every machine.

    Raises:
        MachineNotReadyError: no file exists or matches.
        RequestError: one is unreadable, or all are empty.
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
            wanted = ", ".join(pattern)
            raise MachineNotReadyError(f"{where} has no file that matches {wanted}; name others with pattern")
    if not files:
        raise MachineNotReadyError(f"{where} matches no file")
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
        MachineNotReadyError: the file is in none of the folders that downloads use.
    """
    folder = expand_home(folder)
    if not folder.exists():
        raise MachineNotReadyError(f"{folder} does not exist{nearest_file(folder)}")
    if not folder.is_dir():
        raise RequestError(f"{folder} is a file, but must be the folder of MNIST's IDX files")
    for parent in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for spelling in (name, name.replace("-idx", ".idx")):
            for path in (parent / spelling, parent / f"{spelling}.gz"):
                if path.is_file():
                    return path
    raise MachineNotReadyError(f"{folder} lacks {name} (or {name}.gz)")
