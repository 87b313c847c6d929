"""Load a checkpoint, or the newest intact one of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import file as files
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import CheckpointError, RequestError
from trainer.contract.record.checkpoints import checkpoints_in, is_dcp_folder


def load(path: Path | str, *, mapped: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint, its tensors on the CPU, or ``mapped`` from the file, where they take no memory.

    Raises:
        CheckpointError: the file is missing, torn, altered or not a checkpoint of this package.
    """
    state = load_plain(path, checked=True, mapped=mapped)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a training's state")
    return state


def load_plain(path: Path | str, *, checked: bool = False, mapped: bool = False) -> Any:
    """Return the content of a file of ``torch.save``, its tensors on the CPU."""
    path = Path(path)
    with naming_the_file(path):
        if path.exists() and not path.is_file():  # opening a pipe without a writer would block
            raise CheckpointError(f"{path}: is not a file")
        with path.open("rb") as file:
            if checked:
                files.check(path, file)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def peek(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, to read its plain values; tensors are memory-mapped, nothing is verified."""
    with naming_the_file(path):
        files.sequence_of(path)
    state = load_plain(path, mapped=True)
    return state if isinstance(state, dict) else {}


@contextmanager
def naming_the_file(path: Path, failed: str = "cannot be loaded") -> Iterator[None]:
    """Raise ``CheckpointError`` for any error of the body, which reads a file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # noqa: BLE001 - torch raises errors of many types for a damaged file
        raise CheckpointError(f"{path}: {failed}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Return torch's error in one line, without its advice to load the file with ``weights_only=False``."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return "".join(char for char in line.strip() if char.isprintable())


def good_ones(
    folder: Path | str, *, run: str = "", mapped: bool = False, on_skipped: Callable[[str], None]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the intact checkpoints of a folder with their states, newest first."""
    for path in in_order(Path(folder), on_skipped):
        if run and owner_of(path) not in ("", run):
            continue
        try:
            state = load(path, mapped=mapped)
        except CheckpointError as error:
            on_skipped(f"skipped: {error}")
            continue
        yield path, state


def open_checkpoint(
    path: Path, *, flag: str, run: str = "", mapped: bool = False, names_whole: bool = True
) -> tuple[Path, dict[str, Any], list[str]]:
    """Load a checkpoint file, or the newest intact one of a folder; return path, state and a line per skipped file.

    Raises:
        RequestError: the folder has no intact checkpoint, or the file is of another run.
        CheckpointError: the file cannot be loaded; with ``names_whole`` the message names another one of the run.
    """
    if not path.is_dir():
        try:
            state = load(path, mapped=mapped)
        except CheckpointError as error:
            beside = good_ones(path.parent, run=run, mapped=True, on_skipped=lambda _: None)
            whole, _ = next(beside, (None, None)) if run and names_whole else (None, None)
            if whole is None:
                raise
            raise CheckpointError(f"{error}; {whole} of the same run is whole") from None
        if run and (found_run := owner_of(path)) not in ("", run):
            raise RequestError(f"{flag} {path}: it is a checkpoint of {found_run}, not of {run}")
        return path, state, []
    passed_over: list[str] = []
    newest = next(good_ones(path, run=run, mapped=mapped, on_skipped=passed_over.append), None)
    if newest is not None:
        return *newest, passed_over
    if not passed_over:
        of_torch = "; torch.distributed.checkpoint wrote it: --finetune-from, predict and export take its weights"
        other = of_torch if is_dcp_folder(path) else ""
        raise RequestError(f"{flag} {path}: the folder holds no checkpoint{f' of {run}' if run else ''}{other}")
    first, *others = (line.removeprefix("skipped: ") for line in passed_over)
    more = f" (and {len(others)} more)" if others else ""
    raise RequestError(f"{flag} {path}: the folder holds no intact checkpoint: {first}{more}")


def in_order(folder: Path, on_skipped: Callable[[str], None]) -> list[Path]:
    """Return the folder's checkpoints, newest first; of the names of one file ``step_*`` comes first."""
    checkpoints = []
    for path in (folder / name for name in sorted(checkpoints_in(folder), reverse=True)):
        try:
            if not path.is_file():  # opening a pipe without a writer would block
                on_skipped(f"skipped: {path}: is not a file")
                continue
            checkpoints.append((files.sequence_of(path), path.name, path))
        except OSError as error:
            on_skipped(f"skipped: {path}: cannot be read ({error.strerror})")
        except CheckpointError as error:
            on_skipped(f"skipped: {error}")
    # Not sorted by step: a run resumed from an earlier step writes lower steps than those that it has abandoned.
    return [path for *_, path in sorted(checkpoints, reverse=True)]
