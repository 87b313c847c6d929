"""How a checkpoint comes back, and which one of a folder does: the good one that was written last."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from trainer.checkpoint import file as files
from trainer.errors import CheckpointError, printable


def load(path: Path | str) -> dict[str, Any]:
    """Return the state of a checkpoint, its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, torn, altered, of another program or not a checkpoint at all.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            files.check(path, file)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be loaded: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a training's state")
    return state


def newest(
    folder: Path | str, *, on_skipped: Callable[[str], None] | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the good checkpoint of a folder that was written last, and its state; None where there is none.

    Args:
        folder: where a ``CheckpointWriter`` has written; may be missing.
        on_skipped: told about each file that cannot be used, in one line; default: the line goes to stderr.
    """
    say = on_skipped or tell
    for path in by_time(Path(folder), say):
        try:
            return path, load(path)
        except CheckpointError as error:
            say(f"passed over: {error}")
    return None


def tell(line: str) -> None:
    """Tell a person."""
    print(printable(line), file=sys.stderr, flush=True)


def by_time(folder: Path, on_skipped: Callable[[str], None]) -> list[Path]:
    """Return the folder's checkpoints, newest first; a step's own name comes before the name of the best."""
    found = []
    for path in sorted((*folder.glob("step_*.pt"), *folder.glob(files.BEST)), reverse=True):
        try:
            found.append((files.written_ns(path), path))
        except OSError as error:
            on_skipped(f"passed over: {path}: cannot be read ({error.strerror})")
        except CheckpointError as error:
            on_skipped(f"passed over: {error}")
    # Not by step: a run continued from an earlier step writes lower numbers than the branch that it left.
    return [path for _, path in sorted(found, key=lambda entry: entry[0], reverse=True)]
