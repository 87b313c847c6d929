"""``gputrain completion``: prints the completion script of a shell.

The scripts are argcomplete's: at each completion they call ``gputrain`` with the line in the environment. Candidates
come from the arguments of the commands and the names in the runs folder; no run is read.
"""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from gputrain_tui import paths
from gputrain_tui.commands import load
from gputrain_tui.help_topics import ORDER
from gputrain_tui.recipe.files import matching_names
from trainer.contract.errors import ExitCode, RequestError

INSTALLATION = {
    "bash": 'In ~/.bashrc:  eval "$(gputrain completion bash)"',
    "zsh": 'In ~/.zshrc, after compinit:  eval "$(gputrain completion zsh)"',
    "fish": "In ~/.config/fish/config.fish:  gputrain completion fish | source",
}
ZSH_LINE = {
    'COMP_LINE="$BUFFER"': 'COMP_LINE="${(j: :)words[1,CURRENT]}"',
    'COMP_POINT="$CURSOR"': 'COMP_POINT="${#${(j: :)words[1,CURRENT]}}"',
}
"""Argcomplete takes the whole line → the command in it, which may follow another one or a setting of a variable."""
SUFFIXES = {
    "RECIPE": (".toml", ".json"),
    "CHECKPOINT": (".pt", ".safetensors"),
    "RUN": (".tar.gz", ".tar.zst"),
    "DIR": (),
    "FILE": ("",),
    "PATH": ("",),
}
"""Suffixes of the files that an argument takes, by its metavar."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(INSTALLATION), help="shell to print the script for")


def run(args: Namespace) -> int:
    """Print the script."""
    print(f"# Completion of gputrain for {args.shell}. {INSTALLATION[args.shell]}")
    script = shellcode(["gputrain"], shell=args.shell, complete_arguments=[])
    for whole, command in ZSH_LINE.items() if args.shell == "zsh" else ():
        script = script.replace(whole, command)
    print(script)
    return ExitCode.FINISHED


def complete(commands: Mapping[str, str]) -> None:
    """Print the completions of the line that argcomplete's script has put into the environment, and exit."""
    before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    typed = before[1] if len(before) > 1 else ""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--help", action="store_true", help="show all commands")
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("--hostfile", metavar="FILE", help="machines to show")
    subparsers = parser.add_subparsers()
    for name, text in commands.items():
        if name.startswith(typed):
            command = subparsers.add_parser(name, help=text, allow_abbrev=False)
            if name == typed:
                load(name).add_arguments(command)
    CompletionFinder()(parser, always_complete_options=False, default_completer=_values)  # type: ignore[arg-type]


def _values(prefix: str, action: Action, **_: Any) -> dict[str, str]:
    """Return values of an argument without choices by its metavar, each with its help, which may be empty."""
    values: dict[str, str] = {}
    for kind in str(action.metavar or "").split("|"):
        if kind == "KEY=VALUE":
            values |= _recipe_keys()
        elif kind == "TOPIC" or kind.islower():
            values |= dict.fromkeys(ORDER if kind == "TOPIC" else [kind], "")
        elif kind in SUFFIXES:
            if kind == "RUN":
                values |= dict.fromkeys(_run_names(prefix), "")
            folders = ("/",) if kind != "RUN" or "/" in prefix else ()
            names = matching_names(prefix, Path())
            folder = prefix[: prefix.rfind("/") + 1]
            values |= {folder + name: "" for name in names if name.endswith((*folders, *SUFFIXES[kind]))}
    return values


def _run_names(prefix: str) -> Iterator[str]:
    """Yield ``last`` and the names of the newest run directories that begin with a word, newest first."""
    try:
        with os.scandir(paths.runs_folder()) as entries:
            names = [entry.name for entry in entries if entry.name[:8].isdecimal()]
    except (OSError, RequestError):
        return
    yield from (["last"] if names else [])
    # Runs offered at once; a shell shows no more in one screen, and a word that is longer offers others.
    offered_runs = 200
    yield from nlargest(offered_runs, (name for name in names if name.startswith(prefix)))


def _recipe_keys() -> dict[str, str]:
    """Return the keys of a recipe with their help, without those of ``[task]``."""
    from gputrain_tui.recipe.model import ClusterOptions, ReportOptions, SlurmOptions, train_options
    from trainer.contract.schema import describe

    tables = {"cluster": describe(ClusterOptions), "slurm": describe(SlurmOptions), "report": describe(ReportOptions)}
    tables = {"train": train_options(), **tables}
    return {f"{table}.{option.name}=": option.help for table, options in tables.items() for option in options}
