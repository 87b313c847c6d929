"""``gputrain export``: writes the record or a checkpoint of a run in formats of other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gputrain_tui.commands.shared_flags import add_checkpoint, add_ranks, chosen_ranks
from gputrain_tui.history.export.extent import shortcomings, summary
from gputrain_tui.history.export.steps import RecordedSteps
from gputrain_tui.history.export.table import write_csv, write_jsonl
from gputrain_tui.history.export.trace import write_trace
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint, find_or_last_trained
from gputrain_tui.output import print_message
from gputrain_tui.tables import printable, size
from trainer.contract.errors import ExitCode, MachineNotReadyError, RequestError
from trainer.contract.output_file import OutputError, output_file, output_folder, require_folder_place, require_place

STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """Format of ``--to``."""

    suffix: str
    write: Callable[[Namespace, Path | None], int]
    """Function of the flags and ``--output``, which writes the file and returns the command's exit code."""
    takes: tuple[str, ...] = ()
    """Optional flags that apply to the format."""


class Written(msgspec.Struct, kw_only=True):
    """Output of ``python -m trainer.export_weights``."""

    checkpoint: str
    step: int | None
    tensors: int
    bytes: int
    left_out: list[str]
    """Entries of the model state that are no dense tensors."""
    without_task_state: str
    """Why the state of the task is not in the file; empty if it is, and if there is none."""
    passed_over: list[str]
    """A line for each newer checkpoint that cannot be used."""


def _weights(args: Namespace, output: Path | None) -> int:
    if str(output) == STDOUT:
        raise RequestError(f"export: --to {args.to} is not written to standard output: name a path with -o PATH")
    chosen = choose_checkpoint(args.named, args.checkpoint, here=True)
    output = output or Path((chosen.path.stem if chosen.run is None else chosen.run.id) + FORMATS[args.to].suffix)
    flags = [
        f"--to={args.to}",
        *(["--force"] if args.force else []),
        *([f"--run={chosen.run_id}"] if chosen.run_id else []),
    ]
    argv = [*flags, "--", str(chosen.path), str(output)]
    # A process of its own, as this one never imports torch, which reads checkpoints.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.export_weights", *argv], capture_output=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != ExitCode.FINISHED:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        print_message(lines[-1].removeprefix("trainer: ") if lines else f"it ended with exit code {done.returncode}")
        return done.returncode if done.returncode in set(ExitCode) else ExitCode.FAILED
    written = msgspec.json.decode(done.stdout, type=Written)
    for line in written.passed_over:
        print_message(line)
    print_message(f"exported {chosen.description}, {written.checkpoint}")
    if written.left_out:
        print_message(f"left out, because they are not dense tensors: {', '.join(written.left_out)}")
    if written.without_task_state:
        print_message(
            f"the task's state (such as its vocabulary) is not in {output}, as "
            f"{written.without_task_state}; the checkpoint holds it"
        )
    step = "" if written.step is None else f" of step {written.step}"
    print(printable(f"{output}: weights{step}, {written.tensors} tensors, {size(written.bytes)}"))
    return ExitCode.FINISHED


def _steps(write: Callable[[RecordedSteps, BinaryIO], None]) -> Callable[[Namespace, Path | None], int]:
    """Return a ``write`` function that exports the steps of a run to one file."""

    def export(args: Namespace, output: Path | None) -> int:
        record = _record(args)
        output = _place(args, record.run, output)
        with _file(output) as file:
            write(record, file)
            _require_steps(record)
        return _print_result(record, output)

    return export


def _tensorboard(args: Namespace, output: Path | None) -> int:
    from gputrain_tui.history.export.tensorboard_folder import PREFIX, write_tensorboard

    record = _record(args)
    output = output or Path(record.run.id + FORMATS[args.to].suffix)
    if str(output) == STDOUT:
        raise RequestError("export: --to tensorboard writes a folder: name one with -o FOLDER")
    require_folder_place(output, force=args.force, prefix=PREFIX)
    with output_folder(output) as folder:
        write_tensorboard(record, folder)
        _require_steps(record)
    return _print_result(record, output)


def _archive(args: Namespace, output: Path | None) -> int:
    from gputrain_tui.history.export.archive import Archive

    run = find_or_last_trained(args.named)
    archive = Archive(run, logs=bool(args.logs))
    output = _place(args, run, output)
    with _file(output) as file:
        written = archive.write(file, environment=os.environ, project=Path.cwd())
    for line in shortcomings(run):
        print_message(line)
    for line in written.left_out:
        print_message(f"left out: {line}")
    if written.hidden:
        print_message(f"hidden: {written.hidden:,} values of variables, arguments and settings")
    if not args.logs:
        print_message("left out: what ranks printed, and texts of their exceptions; --logs adds them")
    _report(output, f"{written.files:,} files of {run.id}, {size(written.bytes)} unpacked, without checkpoints")
    return ExitCode.FINISHED


def _record(args: Namespace) -> RecordedSteps:
    run = find_or_last_trained(args.named)
    ranks = chosen_ranks(args, run, command="export") or range(run.status.recorded_ranks)
    return RecordedSteps(run, ranks)


def _place(args: Namespace, run: Run, output: Path | None) -> Path:
    output = output or Path(run.id + FORMATS[args.to].suffix)
    if str(output) != STDOUT:
        require_place(output, force=args.force)
    return output


def _file(output: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdout.buffer) if str(output) == STDOUT else output_file(output)


def _require_steps(record: RecordedSteps) -> None:
    if not any(extent.steps for extent in record.extents.values()):
        scope = "" if len(record.ranks) == record.run.status.recorded_ranks else " of these ranks"
        raise RequestError(f"{record.run.id} has recorded no step{scope}: there is nothing to export")


def _print_result(record: RecordedSteps, output: Path) -> int:
    extents = list(record.extents.values())
    for line in shortcomings(record.run, extents):
        print_message(line)
    _report(output, summary(extents))
    return ExitCode.FINISHED


def _report(output: Path, contents: str) -> None:
    """Print output, contents and size; only the contents, on stderr, if the output was standard output."""
    if str(output) == STDOUT:
        print_message(contents)
        return
    files = [path for path in output.rglob("*") if path.is_file()] if output.is_dir() else [output]
    print(printable(f"{output}: {contents}, {size(sum(path.stat().st_size for path in files))}"))


FORMATS = {
    "csv": ExportFormat(suffix=".csv", write=_steps(write_csv), takes=("rank",)),
    "jsonl": ExportFormat(suffix=".jsonl", write=_steps(write_jsonl), takes=("rank",)),
    "tensorboard": ExportFormat(suffix=".tensorboard", write=_tensorboard, takes=("rank",)),
    "chrome-trace": ExportFormat(suffix=".trace.json", write=_steps(write_trace), takes=("rank",)),
    "archive": ExportFormat(suffix=".tar.gz", write=_archive, takes=("logs",)),
    "safetensors": ExportFormat(suffix=".safetensors", write=_weights, takes=("checkpoint",)),
    "dcp": ExportFormat(suffix=".dcp", write=_weights, takes=("checkpoint",)),
}


def add_arguments(parser: ArgumentParser) -> None:
    add_checkpoint(parser)
    add_ranks(parser)
    text = (
        "csv, jsonl: a line per rank and step; tensorboard: a folder of event files; chrome-trace: a timeline for "
        "Perfetto; archive: recipe, plan and record as one file for `gputrain attach`; safetensors, dcp: weights, as a "
        "file or as a folder of torch.distributed.checkpoint"
    )
    parser.add_argument("--to", choices=tuple(FORMATS), required=True, help=text)
    text = "default: the run's or the checkpoint's name, in this folder; - writes one file to standard output"
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help=text)
    text = "with --to archive: add what the ranks printed, and the texts of their exceptions"
    parser.add_argument("--logs", action="store_true", default=None, help=text)
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: Namespace) -> int:
    """Write the file; return the exit code."""
    chosen = FORMATS[args.to]
    for flag in ("rank", "checkpoint", "logs"):
        if getattr(args, flag) is not None and flag not in chosen.takes:
            able = ", ".join(name for name, other in FORMATS.items() if flag in other.takes)
            raise RequestError(f"export: --{flag} is for --to {able}, not for {args.to}")
    try:
        return chosen.write(args, args.output)
    except MachineNotReadyError as error:
        print_message(str(error))
        return ExitCode.REFUSED
    except OutputError as error:
        print_message(str(error))
        return ExitCode.FAILED
