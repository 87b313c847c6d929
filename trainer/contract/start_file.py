"""The checkpoint or the weights from which a run starts, by names alone; torch-free: preflight looks on each host."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.record.checkpoints import DCP_METADATA, is_dcp_folder


def start_problem(option: str, path: Path) -> str:
    """Return why a run cannot start from a path in ``resume``, ``eval_only`` or ``finetune_from``; empty if it may.

    Names are checked, not contents: an intact checkpoint takes seconds to read.
    """
    try:
        if not path.exists():
            return f"{path} does not exist"
        if path.is_dir() and option == "finetune_from":
            if not is_dcp_folder(path):
                return f"{path} is a folder"
            whole = (path / DCP_METADATA).is_file()
            return "" if whole else f"{path} has no {DCP_METADATA}: it was not saved to the end"
        if path.is_dir() and not any(path.glob("*.pt")):
            return f"{path} holds no checkpoint"
    except OSError as failure:
        return f"{path} cannot be read: {failure.strerror}"
    return ""
