"""``gputrain completion``: prints the completion script of a shell.

The scripts call ``gputrain __complete WORD...`` at each completion. Its candidates come from the arguments of the
commands and the names in the runs folder; no run is read.
"""

from __future__ import annotations

import importlib
import os
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from pathlib import Path

from gputrain_tui import paths
from gputrain_tui.arguments import FlagParser
from gputrain_tui.help_topics import ORDER
from trainer.contract.errors import ExitCode, RequestError

NAME = "completion"
HELP = "print the script that completes commands, flags and runs in bash, zsh or fish"

RECIPES = (".toml", ".json")
CHECKPOINTS = (".pt", ".safetensors")
ARCHIVES = (".tar.gz", ".tar.zst")

BASH = r"""# Completion of gputrain for bash. In ~/.bashrc:  eval "$(gputrain completion bash)"
_gputrain() {
    local line=${COMP_LINE:0:COMP_POINT} current=${COMP_WORDS[COMP_CWORD]} IFS=$' \t\n' words word
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    # bash replaces only what is behind the last = or :
    [[ $current == [=:] ]] && current=""
    local prefix=${words[-1]%"$current"}
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        [[ $word == *[=/] ]] && compopt -o nospace
        COMPREPLY+=("$(printf %q "${word#"$prefix"}")")
    done < <("${words[0]}" __complete "${words[@]:1}" 2> /dev/null)
}
complete -F _gputrain gputrain
"""

ZSH = r"""#compdef gputrain
# Completion of gputrain for zsh. In ~/.zshrc, after compinit:  eval "$(gputrain completion zsh)"
_gputrain() {
    local line word
    local -a ended open shown_ended shown_open
    for line in "${(@f)$($words[1] __complete "${(@)words[2,CURRENT]}" 2> /dev/null)}"; do
        word=${line%%$'\t'*}
        [[ -n $word ]] || continue
        if [[ $word == *[=/] ]]; then
            open+=("$word") shown_open+=("${line/$'\t'/  -- }")
        else
            ended+=("$word") shown_ended+=("${line/$'\t'/  -- }")
        fi
    done
    (( $#ended )) && compadd -l -d shown_ended -a ended
    (( $#open )) && compadd -l -S '' -d shown_open -a open
}
compdef _gputrain gputrain
"""

FISH = r"""# Completion of gputrain for fish. In ~/.config/fish/config.fish:  gputrain completion fish | source
function __gputrain_complete
    set -l words (commandline -opc)
    $words[1] __complete $words[2..-1] (commandline -ct) 2> /dev/null
end
complete -c gputrain -f -a '(__gputrain_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare ``SHELL``."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="shell to print the script for")


def run(args: Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[args.shell], end="")
    return ExitCode.FINISHED


def complete(argv: Sequence[str], commands: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the completions of the last word, each with its help, which may be empty.

    Args:
        argv: words after ``gputrain``; the last one is being typed, and may be empty.
        commands: module and one-line help of each command, by name.
    """
    *before, word = argv or [""]
    if not before:
        flags = {"--help": "show all commands", "--version": "show the version", "--hostfile": "machines to show"}
        offered = {name: text for name, (_, text) in commands.items()} | (flags if word.startswith("-") else {})
        yield from _with_prefix(offered.items(), word)
    elif before[0] in commands:
        command = importlib.import_module(commands[before[0]][0])
        parser = FlagParser(command=before[0])
        command.add_arguments(parser)
        yield from _arguments(parser.actions, before[1:], word)
    elif before == ["--hostfile"]:
        yield from _files(word)


def _arguments(actions: Sequence[Action], before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    flags = {text: action for action in actions for text in action.option_strings}
    needs_value, positional = False, 0
    for earlier in before:
        if not needs_value and earlier.startswith("-") and earlier != "-":
            needs_value = earlier in flags and flags[earlier].nargs is None
        else:
            positional += not needs_value
            needs_value = False
    name, equals, value = word.partition("=")
    if needs_value:
        yield from _values(flags[before[-1]], word)
    elif equals and name in flags:
        yield from ((f"{name}={found}", text) for found, text in _values(flags[name], value))
    elif word.startswith("-"):
        yield from _with_prefix(((text, action.help or "") for text, action in flags.items()), word)
    else:
        positionals = [action for action in actions if not action.option_strings]
        yield from _values(positionals[positional], word) if positional < len(positionals) else ()


def _values(action: Action, word: str) -> Iterator[tuple[str, str]]:
    """Yield values of an argument: its choices, or runs, files or keys by its metavar."""
    if action.choices is not None:
        yield from _with_prefix(((str(choice), "") for choice in action.choices), word)
    for kind in str(action.metavar or "").split("|"):
        if kind == "RUN":
            yield from _with_prefix(((name, "") for name in _run_names(word)), word)
            yield from (found for found in _files(word, ARCHIVES) if "/" in word or not found[0].endswith("/"))
        elif kind == "KEY=VALUE":
            yield from _with_prefix(_keys(), word)
        elif kind == "TOPIC":
            yield from _with_prefix(((name, "") for name in ORDER), word)
        elif kind in ("RECIPE", "CHECKPOINT", "FILE", "PATH", "DIR"):
            yield from _files(word, {"RECIPE": RECIPES, "CHECKPOINT": CHECKPOINTS, "DIR": ()}.get(kind))
        elif kind.islower():
            yield from _with_prefix([(kind, "")], word)


def _run_names(word: str) -> Iterator[str]:
    """Yield ``last`` and the names of the newest run directories that begin with a word, newest first."""
    try:
        with os.scandir(paths.runs_folder()) as entries:
            names = [entry.name for entry in entries if entry.name[:8].isdecimal()]
    except (OSError, RequestError):
        return
    yield from (["last"] if names else [])
    # Runs offered at once; a shell shows no more in one screen, and a word that is longer offers others.
    offered_runs = 200
    yield from nlargest(offered_runs, (name for name in names if name.startswith(word)))


def _keys() -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe with their help, without those of ``[task]``."""
    from gputrain_tui.recipe.model import ClusterOptions, SlurmOptions, train_options
    from gputrain_tui.recipe.report_options import ReportOptions
    from trainer.contract.schema import describe

    tables = {"cluster": describe(ClusterOptions), "slurm": describe(SlurmOptions), "report": describe(ReportOptions)}
    for table, options in {"train": train_options(), **tables}.items():
        yield from ((f"{table}.{option.name}=", option.help) for option in options)


def _files(word: str, suffixes: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the folders and files whose paths begin with a word.

    Args:
        word: beginning of the path.
        suffixes: suffixes of the files; None for all files.
    """
    name = word.rpartition("/")[2]
    shown = word[: len(word) - len(name)]
    try:
        with os.scandir(Path(shown or ".").expanduser()) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name.startswith(name))
    except (OSError, RuntimeError):
        return
    for entry_name, is_folder in found:
        if entry_name.startswith(".") and not name.startswith("."):
            continue
        if is_folder:
            yield f"{shown}{entry_name}/", ""
        elif suffixes is None or entry_name.endswith(suffixes):
            yield f"{shown}{entry_name}", ""


def _with_prefix(offered: Iterable[tuple[str, str]], word: str) -> Iterator[tuple[str, str]]:
    return ((value, text) for value, text in offered if value.startswith(word))
