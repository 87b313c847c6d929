"""``gputrain init``: writes a commented recipe of a script, a task, a command of another launcher, or an example."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gputrain_tui.output import print_message
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.new_recipe import (
    SCRIPT,
    NewRecipe,
    example_names,
    example_text,
    examples_folder,
    file_name,
    from_argv,
    from_pasted,
    from_text,
)
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from gputrain_tui.shell_words import shell_quoted
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.schema import describe

T = TypeVar("T")


def add_arguments(parser: ArgumentParser) -> None:
    text = "after --: a command of torchrun, accelerate, deepspeed, srun or python; without one it is read from "
    parser.add_argument("argv", metavar="COMMAND", nargs="*", help=f"{text}standard input, or asked for")
    text = "copy a recipe that comes with gputrain, with its comments"
    parser.add_argument("--example", metavar="|".join(example_names()), help=text)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: the script's name with .toml; - prints it")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: Namespace) -> int:
    """Write the recipe."""
    if args.example is not None:
        return _write_example(args)
    if args.argv or not sys.stdin.isatty():
        new = from_argv(args.argv) if args.argv else from_pasted(sys.stdin.read(MAX_RECIPE_BYTES))
    else:
        new = _from_answers()
    if args.output not in (None, "-"):
        new = replace(new, name=Path(args.output).stem)
    script = new.train.get("script")
    if script and not (new.train.get("module") or Path(script).exists()):
        note = f"{script} is not here: a script's path is relative to the folder in which gputrain is started"
        new = replace(new, notes=(*new.notes, note))
    output = args.output or file_name(new.name)
    text = new.text(file=output if output != "-" else "RECIPE")
    build(text, name=output)
    if output != "-":
        return _write({Path(output): text}, force=args.force, notes=new.notes)
    print(text, end="")
    for note in new.notes:
        print_message(note)
    return ExitCode.FINISHED


def _write_example(args: Namespace) -> int:
    """Write an example, and beside it the script that it runs."""
    if args.argv:
        raise RequestError("init: --example and a command exclude each other; keep one of them")
    output = args.output or f"{args.example}.toml"
    script = Path(output).with_name(SCRIPT)
    text = example_text(args.example, file=output if output != "-" else "RECIPE", script=str(script))
    if output == "-":
        print(text, end="")
        return ExitCode.FINISHED
    files = {Path(output): text}
    if build(text, name=output).script is not None:
        files[script] = (examples_folder() / SCRIPT).read_text(encoding="utf-8")
    return _write(files, force=args.force)


def _write(files: Mapping[Path, str], *, force: bool, notes: Sequence[str] = ()) -> int:
    """Write all files or, if one exists, none; print their names, notes and the next commands."""
    for path in files:
        if path.exists() and not force:
            raise RequestError(f"init: {path} already exists: replace it with --force, or name another file with -o")
    for path, text in files.items():
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
        print(path)
    for note in notes:
        print_message(note)
    name = shell_quoted(str(next(iter(files))))
    print_message(f"`gputrain check {name}` checks it, `gputrain run {name}` runs it")
    return ExitCode.FINISHED


def _from_answers() -> NewRecipe:
    """Return the recipe of what is typed as in the console; what its task needs besides is asked for, too."""
    tasks = ", ".join(BUILT_IN)
    new = _ask(f"What to train? A script such as train.py, a task ({tasks}), or the command that starts it", from_text)
    schema = options_schema(task) if (task := new.train.get("task")) in BUILT_IN else None
    needed = [option for option in describe(schema) if option.required] if schema is not None else []
    return replace(new, task={option.name: _ask(f"{option.name}: {option.help}", _not_empty) for option in needed})


def _ask(question: str, parse: Callable[[str], T]) -> T:
    """Print a question and parse the answer; repeat until it is valid."""
    while True:
        print(f"{question}: ", end="", file=sys.stderr, flush=True)
        lines = [sys.stdin.readline()]
        while lines[-1].endswith("\\\n"):
            lines.append(sys.stdin.readline())
        if not lines[-1]:
            print(file=sys.stderr)
            raise RequestError("init: standard input has ended; nothing was written")
        try:
            return parse("".join(lines).strip())
        except ValueError as error:  # also a RequestError
            print_message(str(error))


def _not_empty(text: str) -> str:
    if not text:
        raise RequestError("it has no default: a value is needed")
    return text
