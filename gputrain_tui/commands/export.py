"""``gputrain export``: writes what a run has made in the format of another program."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gputrain_tui.commands.checkpoint_flags import add_checkpoint
from gputrain_tui.lifecycle.checkpoints import ChosenCheckpoint, choose_checkpoint
from gputrain_tui.output import narrate
from gputrain_tui.tables import printable, size
from trainer.contract.errors import ExitCode

NAME = "export"
HELP = "write the weights of a checkpoint as another program reads them"


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format that ``--to`` names."""

    suffix: str
    """Of the file's name where none is given."""
    write: Callable[[ChosenCheckpoint, Path, bool], int]
    """Writes the file, over one that is there if the last argument allows it; returns the command's exit code."""


class Written(msgspec.Struct, kw_only=True):
    """What the trainer's program says that it wrote."""

    checkpoint: str
    step: int
    tensors: int
    bytes: int
    left_out: list[str]
    passed_over: list[str]


def _safetensors(chosen: ChosenCheckpoint, output: Path, force: bool) -> int:
    words = [*(["--force"] if force else []), "--", str(chosen.path), str(output)]
    # A process of its own: reading a checkpoint takes torch, which this one never imports.
    done = subprocess.run(
        [sys.executable, "-m", "trainer.export_weights", *words], capture_output=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != ExitCode.FINISHED:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        narrate(lines[-1].removeprefix("trainer: ") if lines else f"it ended with exit code {done.returncode}")
        return done.returncode if done.returncode in set(ExitCode) else ExitCode.FAILED
    written = msgspec.json.decode(done.stdout, type=Written)
    for line in written.passed_over:
        narrate(line)
    narrate(f"exported {chosen.why}, {written.checkpoint}")
    if written.left_out:
        narrate(f"left out, because they are no tensors: {', '.join(written.left_out)}")
    print(printable(f"{output}: weights of step {written.step}, {written.tensors} tensors, {size(written.bytes)}"))
    return ExitCode.FINISHED


FORMATS = {"safetensors": ExportFormat(suffix=".safetensors", write=_safetensors)}
"""By the name that ``--to`` takes."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    add_checkpoint(parser)
    parser.add_argument("--to", choices=tuple(FORMATS), required=True, help="the format")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: the run's or the checkpoint's name, in this folder"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: Namespace) -> int:
    """Export; return the exit code."""
    chosen = choose_checkpoint(args.named, args.checkpoint)
    form = FORMATS[args.to]
    name = chosen.path.stem if chosen.run is None else chosen.run.id
    return form.write(chosen, args.output or Path(name + form.suffix), args.force)
