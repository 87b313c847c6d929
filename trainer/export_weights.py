"""``python -m trainer.export_weights CHECKPOINT OUTPUT``: write a checkpoint's weights in a format of other programs.

The console, which does not import torch, runs it and reads the JSON report on standard output. Torch is imported only
after the request is checked, so that refusals come at once.
"""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer.contract.errors import ExitCode, RequestError, print_message
from trainer.contract.output_file import OutputError, output_folder, require_folder_place, require_place
from trainer.contract.record.checkpoints import DCP_METADATA, is_dcp_folder

if TYPE_CHECKING:
    from torch import Tensor

NOT_INSTALLED = "safetensors is not installed: pip install 'safetensors>=0.8'"


class Exported(msgspec.Struct, kw_only=True):
    """Report of an export."""

    checkpoint: str
    """Checkpoint file that was read."""
    step: int | None
    """Optimizer steps of the weights; None if not known."""
    tensors: int
    """Number of tensors written."""
    bytes: int
    """Size of the file or of the folder's files."""
    left_out: list[str] = []
    """Entries of the model's state that are not dense tensors, which the format does not support."""
    without_task_state: str = ""
    """Why the state of the task is not in the file; empty if it is, and if there is none."""
    passed_over: list[str] = []
    """One line for each newer checkpoint that cannot be used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; an error is one line on standard error."""
    parser = ArgumentParser(prog="python -m trainer.export_weights", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="a file, or a folder, whose newest intact checkpoint is used")
    parser.add_argument("output", type=Path)
    parser.add_argument("--to", choices=("safetensors", "dcp"), default="safetensors", help="format")
    parser.add_argument("--run", default="", help="only a checkpoint of this run")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    args = parser.parse_args(argv)
    output: Path = args.output
    try:
        if args.to == "dcp":
            require_folder_place(output, force=args.force, prefix=("__", DCP_METADATA))
        else:
            require_place(output, force=args.force)
            if not _has_safetensors():
                print_message(NOT_INSTALLED, program="trainer")
                return ExitCode.REFUSED
        exported = _export(args.checkpoint, output, to=args.to, run=args.run)
    except RequestError as error:
        print_message(str(error), program="trainer")
        return ExitCode.BAD_REQUEST
    except OutputError as error:
        print_message(str(error), program="trainer")
        return ExitCode.FAILED
    except OSError as error:
        print_message(f"cannot write {output}: {error.strerror or error}", program="trainer")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    print(msgspec.json.encode(exported).decode())
    return ExitCode.FINISHED


def _has_safetensors() -> bool:
    """Return whether safetensors is installed, in a version that takes tensors by their address."""
    try:
        return hasattr(import_module("safetensors"), "TensorSpec")
    except ImportError:
        return False


def _export(checkpoint: Path, output: Path, *, to: str, run: str) -> Exported:
    from torch import Tensor, strided

    from trainer.checkpoint import load_weights, open_checkpoint, weights_of

    if is_dcp_folder(checkpoint):
        weights = load_weights(checkpoint)
        written = _write(output, weights, to=to, metadata={})
        return Exported(checkpoint=str(checkpoint), step=None, tensors=len(weights), bytes=written)
    source, state, passed_over = open_checkpoint(checkpoint, flag="--checkpoint", run=run)
    entries = {str(name): value for name, value in weights_of(state, source=str(source)).items()}
    dense = ((name, value) for name, value in entries.items() if isinstance(value, Tensor))
    weights = {name: value for name, value in dense if value.layout is strided}
    if not weights:
        raise RequestError(f"{source}: holds no weights")
    step = state.get("updates")
    known = {"task": state.get("task"), "step": step, "run": state.get("run")}
    metadata = {name: str(value) for name, value in known.items() if isinstance(value, str | int)}
    task_state, why_not = _as_json(state.get("task_state"))
    if to == "dcp":
        why_not = "a folder of DCP holds the weights alone" if state.get("task_state") else ""
    elif task_state:
        metadata["task_state"] = task_state
    return Exported(
        checkpoint=str(source),
        step=step if isinstance(step, int) else None,
        tensors=len(weights),
        bytes=_write(output, weights, to=to, metadata=metadata),
        left_out=[name for name in entries if name not in weights],
        without_task_state=why_not,
        passed_over=passed_over,
    )


def _write(output: Path, weights: Mapping[str, Tensor], *, to: str, metadata: Mapping[str, str]) -> int:
    """Write the weights; return the size in bytes."""
    if to == "safetensors":
        from trainer.checkpoint.safetensors_file import write_safetensors

        return write_safetensors(output, weights, metadata=metadata)
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    warnings.filterwarnings("ignore", message="torch.distributed is ")  # that there is one process, which is meant
    with output_folder(output) as folder:
        try:
            save({"model": dict(weights)}, storage_writer=FileSystemWriter(folder))
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise OutputError(f"cannot write {output}: {str(cause).partition(chr(10))[0]}") from None
        return sum(path.stat().st_size for path in folder.iterdir())


def _as_json(task_state: object) -> tuple[str, str]:
    """Return the state of a task as JSON and an empty text, or an empty text and why it has no form in JSON."""
    if not task_state:
        return "", ""
    try:
        text = msgspec.json.encode(task_state)
    except TypeError as error:
        return "", f"it has no form in JSON: {error}"
    if msgspec.json.decode(text) != task_state:
        return "", "it has no form in JSON: it holds tuples, or keys that are not text"
    return text.decode(), ""


if __name__ == "__main__":
    sys.exit(main())
