"""The ``gputrain`` command line: imports the module of a command, parses its flags and turns errors into one line.

Help and version import no command, so that they are fast; a command imports only what it needs.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui import VERSION, commands
from gputrain_tui.output import discard, print_message, printable_streams
from trainer.contract.errors import BROKEN_PIPE_CODE, ExitCode, RequestError, nearest, quoted, require_utf8

if TYPE_CHECKING:
    from argparse import Namespace
    from types import ModuleType

COMMANDS = {
    "run": "train a recipe to the end, in the foreground or detached",
    "eval": "evaluate a checkpoint without training, exact over all ranks",
    "predict": "predict with a checkpoint: a JSON line for each line of a file or of standard input",
    "export": "write a run for other programs: csv, TensorBoard, timeline, archive, weights",
    "plan": "show the command of every node; start nothing",
    "check": "check whether a recipe can start, with a fix for each problem; start nothing",
    "gpus": "show the GPUs, cores and memory of this machine, or of others over ssh",
    "push": "copy code and environment to the hosts of a recipe that do not share this disk",
    "report": "tell of a run on a page: what limits it, where its time goes, what went wrong",
    "compare": "compare runs with a first one: recipe, speed, phases, loss; fail on a limit",
    "serve": "show the runs in a browser, read-only, to who has the token",
    "runs": "list past and running runs, newest first",
    "note": "write a note or tags to a run, or print them",
    "attach": "open the console on a run, running or ended",
    "logs": "print the output of a run's ranks",
    "stacks": "print the Python stacks of a run's ranks, equal ones together",
    "wait": "wait until runs have ended, and exit with their exit code",
    "stop": "stop a run everywhere and report any process left",
    "init": "write a recipe of a script, a task, the command of another launcher, or an example",
    "recipe-schema": "print the JSON Schema of a recipe, for editors",
    "completion": "print the script that completes commands, flags and runs in bash, zsh or fish",
    "help": "show a topic of the reference, such as recipe or findings",
}
"""One-line help of each command, by name."""

OTHER_NAMES = {
    "resume": "run --resume RUN",
    **dict.fromkeys(("train", "launch", "start", "submit"), "run RECIPE"),
    **dict.fromkeys(("status", "list", "ls", "ps", "history"), "runs"),
    **dict.fromkeys(("kill", "cancel"), "stop RUN"),
}
"""Commands by the names that they have in other programs."""

COMPLETION = "_ARGCOMPLETE"
"""Variable with which the scripts of ``gputrain completion`` call."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for non-ASCII names and logs on an ASCII terminal
    with printable_streams():
        return _run_command(argv)


def _run_command(argv: list[str]) -> int:
    """Run one command; print an error of the request or the machine as one line; return the exit code."""
    try:
        require_utf8(argv)
        try:
            code = _dispatch(argv)
        except SystemExit:  # raised by argparse after printing the help of a command
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, so that an error of the flush is reported below
        return code
    except RequestError as error:
        print_message(str(error))
        return ExitCode.BAD_REQUEST
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE_CODE
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            print_message("the working directory is gone: change to one that exists")
            return ExitCode.BAD_REQUEST
        if error.errno in DISK_ERRORS:
            discard(sys.stdout)
            where = "standard output" if error.filename is None else error.filename
            print_message(f"cannot write {where}: {error.strerror}")
            return ExitCode.FAILED
        if error.filename is None:
            raise
        print_message(f"{error.filename}: {error.strerror}")  # a path from a flag or the environment
        return ExitCode.BAD_REQUEST


def _open_closed_streams() -> None:
    """Open ``/dev/null`` as each closed standard descriptor, so that the next file opened does not become stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for the whole life of the process


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - only the error matters
    except FileNotFoundError:
        return False
    return True


def _dispatch(argv: list[str]) -> int:
    if COMPLETION in os.environ:
        commands.load("completion").complete(COMMANDS)
    if not argv or argv[0].partition("=")[0] in ("--fps", "--hostfile"):
        return int(importlib.import_module("gputrain_tui.console.entry").main(argv))
    name, *rest = argv
    if name in ("-h", "--help"):
        print(help_text())
        return ExitCode.FINISHED
    if name == "--version":
        print(f"gputrain {VERSION}")
        return ExitCode.FINISHED
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        meant = OTHER_NAMES.get(name)
        guess = f"; did you mean `gputrain {meant}`?" if meant else nearest(name, [*COMMANDS, "--help", "--version"])
        raise RequestError(f"{quoted(name)} is not a known {kind}{guess}; see `gputrain --help`")
    command = commands.load(name)
    return int(command.run(parse(command, name, rest)))


def help_text() -> str:
    """Return the output of ``gputrain --help``."""
    lines = [f"  {name:<13} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Plan, launch, watch and diagnose distributed PyTorch training.",
            "",
            "usage: gputrain [COMMAND] [OPTIONS]      without a command: the console",
            "",
            *lines,
            "",
            "`gputrain --hostfile FILE` opens the console on the machines listed in a file, one per line.",
            "`gputrain COMMAND --help` shows a command's options, `gputrain help` the topics of the reference.",
            "RUN is a run id, a unique prefix of one, or `last`. Exit codes: 0 finished, 1 the training",
            "failed, 2 the request was wrong, 3 preflight refused it, 130 stopped by the user.",
        ]
    )


def parse(command: ModuleType, name: str, argv: Sequence[str]) -> Namespace:
    """Parse the flags of a command's module; a wrong one raises ``RequestError``."""
    from gputrain_tui.arguments import FlagParser

    text = COMMANDS[name]
    parser = FlagParser(command=name, description=f"{text[:1].upper()}{text[1:]}.")
    command.add_arguments(parser)
    return parser.parse_argv(argv)
