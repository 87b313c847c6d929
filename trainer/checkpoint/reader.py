"""Loads a checkpoint, and finds the newest good one of a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import file as files
from trainer.contract.errors import CheckpointError, RequestError, printable


def load(path: Path | str) -> dict[str, Any]:
    """Return the state of a checkpoint, its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, torn, altered, of another program or not a checkpoint at all.
    """
    state = load_plain(path, checked=True)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a training's state")
    return state


def load_plain(path: Path | str, *, checked: bool = False) -> Any:
    """Return what ``torch.save`` has put into a file, its tensors on the CPU.

    Args:
        path: the file.
        checked: whether it must have our checksum, and that must be right.

    Raises:
        CheckpointError: the file is missing, torn, altered or not one of torch's at all.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe without a writer would be waited for
            raise CheckpointError(f"{path}: is not a file")
        with path.open("rb") as file:
            if checked:
                files.check(path, file)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # noqa: BLE001 - whatever reading a file makes torch raise, it cannot be used
        raise CheckpointError(f"{path}: cannot be loaded: {_reason(error)}") from None


def peek(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint as ``load`` does, but read no tensor and compare no checksum: for plain values.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        files.place_of(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - as in load
        raise CheckpointError(f"{path}: cannot be loaded: {_reason(error)}") from None
    return state if isinstance(state, dict) else {}


def _reason(error: Exception) -> str:
    """Return in one line why torch did not load a file; its advice to load it without care is left out."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return "".join(char for char in line.strip() if char.isprintable())


def newest(
    folder: Path | str, *, on_skipped: Callable[[str], None] | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the good checkpoint of a folder that was saved last, and its state; None where there is none.

    Args:
        folder: where a ``CheckpointWriter`` has written; may be missing.
        on_skipped: told about each file that cannot be used, in one line; default: the line goes to stderr.
    """
    return next(good_ones(folder, on_skipped=on_skipped or tell), None)


def good_ones(folder: Path | str, *, on_skipped: Callable[[str], None]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the good checkpoints of a folder and their states, the one that was written last first.

    Args:
        folder: where a ``CheckpointWriter`` has written; may be missing.
        on_skipped: told about each file that cannot be used, in one line.
    """
    for path in in_order(Path(folder), on_skipped):
        try:
            yield path, load(path)
        except CheckpointError as error:
            on_skipped(f"passed over: {error}")


def open_checkpoint(path: Path, *, asked: str) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the checkpoint that a path names, a file or a folder's newest good one: file, state, and what was skipped.

    Args:
        path: the file or the folder.
        asked: the flag that names it, for the message.

    Raises:
        RequestError: there is none.
    """
    if not path.is_dir():
        return path, load(path), []
    passed_over: list[str] = []
    found = next(good_ones(path, on_skipped=passed_over.append), None)
    if found is not None:
        return *found, passed_over
    if not passed_over:
        raise RequestError(f"{asked} {path}: the folder holds no checkpoint")
    newest, *others = (line.removeprefix("passed over: ") for line in passed_over)
    more = f" (and {len(others)} more)" if others else ""
    raise RequestError(f"{asked} {path}: the folder holds no good checkpoint: {newest}{more}")


def tell(line: str) -> None:
    """Tell a person."""
    print(printable(line), file=sys.stderr, flush=True)


def in_order(folder: Path, on_skipped: Callable[[str], None]) -> list[Path]:
    """Return the folder's checkpoints, newest first; a step's own name comes before its further ones."""
    found = []
    for path in (path for name in ("step_*.pt", files.EPOCH.format("*"), files.BEST) for path in folder.glob(name)):
        try:
            if not path.is_file():  # a pipe without a writer would be waited for
                on_skipped(f"passed over: {path}: is not a file")
                continue
            found.append((files.place_of(path), path.name, path))
        except OSError as error:
            on_skipped(f"passed over: {path}: cannot be read ({error.strerror})")
        except CheckpointError as error:
            on_skipped(f"passed over: {error}")
    # Not by step first: a run continued from an earlier step writes lower numbers than the branch that it left.
    return [path for *_, path in sorted(found, reverse=True)]
