"""Words in front of a launch command: settings of variables, ``uv run``, ``nohup``, ``taskset`` and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gputrain_tui.recipe.shell_text import ASSIGNMENT, read_pasted_command, shown
from gputrain_tui.recipe.srun import SlurmStep, read_srun
from gputrain_tui.shell_words import shell_joined
from trainer.contract.errors import RequestError

_SAME_ENVIRONMENT = "{shown} is left out: start gputrain itself with it ({shown} gputrain run …), as ranks inherit it"
_INHERITED = "{shown} is left out: put it before gputrain run, whose ranks on this machine inherit it"
_DETACH = "{shown} is left out: a run that outlives its terminal is started by `gputrain run --detach`"


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A program that starts the command behind its options."""

    note: str
    """Format of the note about it; ``shown`` is the prefix as it was typed."""
    valued: Sequence[str] = ()
    """Options with a value in the next word."""
    arguments: int = 0
    """Words between its options and the command."""


PREFIXES: Mapping[str, Prefix] = {
    "uv run": Prefix(
        note=_SAME_ENVIRONMENT,
        valued=(
            *("--extra", "--no-extra", "--group", "--no-group", "--only-group", "--env-file", "--with", "--python"),
            *("--with-editable", "--with-requirements", "--package", "--project", "--directory", "--index", "-p", "-w"),
            *("--default-index", "--extra-index-url", "--index-url", "--find-links", "-f", "--cache-dir", "--color"),
            *("--config-file", "--link-mode", "--index-strategy", "--python-platform", "--refresh-package", "-P", "-C"),
            *("--upgrade-package", "--reinstall-package", "--resolution", "--prerelease", "--exclude-newer"),
        ),
    ),
    **dict.fromkeys(("poetry run", "pdm run", "pipenv run", "rye run", "hatch run"), Prefix(note=_SAME_ENVIRONMENT)),
    "pixi run": Prefix(note=_SAME_ENVIRONMENT, valued=("-e", "--environment", "--manifest-path", "--color")),
    **dict.fromkeys(
        ("conda run", "mamba run", "micromamba run"),
        Prefix(note=_SAME_ENVIRONMENT, valued=("-n", "--name", "-p", "--prefix", "--cwd")),
    ),
    "nohup": Prefix(note=_DETACH),
    "setsid": Prefix(note=_DETACH),
    "exec": Prefix(note=""),
    "command": Prefix(note=""),
    "time": Prefix(note="", valued=("-f", "-o", "--format", "--output")),
    "unbuffer": Prefix(note=""),
    "nice": Prefix(note=_INHERITED, valued=("-n", "--adjustment")),
    "ionice": Prefix(note=_INHERITED, valued=("-c", "-n", "--class", "--classdata")),
    "stdbuf": Prefix(note="", valued=("-i", "-o", "-e", "--input", "--output", "--error")),
    "numactl": Prefix(
        note=_INHERITED,
        valued=("-N", "-m", "-C", "-i", "-p", "--cpunodebind", "--membind", "--physcpubind", "--interleave"),
    ),
    "taskset": Prefix(note=_INHERITED, arguments=1),
    "timeout": Prefix(
        note="{shown} is left out: put it before gputrain run, which saves and stops at its signal",
        valued=("-s", "--signal", "-k", "--kill-after"),
        arguments=1,
    ),
}
"""Programs in front of a launcher, by their first word or two."""


@dataclass(kw_only=True)
class Prefixed:
    """A launch command without the words in front of it."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    slurm: SlurmStep | None = None
    """What ``srun`` says; None without one."""
    notes: list[str] = field(default_factory=list)


def read_prefixes(argv: Sequence[str]) -> Prefixed:
    """Split a command into what stands in front of its launcher, and the launcher with its words."""
    found = Prefixed(argv=list(argv))
    while found.argv:
        rest = found.argv
        name, two = PurePath(rest[0]).name, " ".join(rest[:2])
        if (setting := ASSIGNMENT.fullmatch(rest[0])) is not None:
            found.env[setting[1]] = setting[2]
            found.argv = rest[1:]
        elif name == "env":
            found.argv = _after_env(rest[1:], found.notes)
        elif name == "srun":
            if found.slurm is not None:
                raise RequestError("the command has srun twice: a recipe is for one step of each node")
            found.slurm, found.argv = read_srun(rest[1:])
            found.env |= found.slurm.env
        elif name in ("bash", "sh") and len(rest) == 3 and rest[1] in ("-c", "-lc", "-ec"):
            pasted = read_pasted_command(shown(rest[2]))
            found.argv = pasted.argv
            found.notes += pasted.notes
        elif (prefix := PREFIXES.get(two) or PREFIXES.get(name)) is not None:
            found.argv = _after_prefix(prefix, rest, 2 if two in PREFIXES else 1, found.notes)
        else:
            break
    return found


def _after_env(rest: list[str], notes: list[str]) -> list[str]:
    """Return the words behind ``env`` and its options."""
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-u", "--unset") and rest:
            option = f"{option} {rest.pop(0)}"
        elif not option.startswith(("--unset=", "-i", "--ignore-environment")) and option not in ("-", "--"):
            raise RequestError(f"env {option} cannot be translated: give init the command behind it")
        if option != "--":
            notes.append(f"env {option} is left out: ranks inherit the variables of gputrain; start it without them")
    return rest


def _after_prefix(prefix: Prefix, argv: list[str], begin: int, notes: list[str]) -> list[str]:
    """Return the words behind a prefix and its options; a Python file or module gets its ``python`` back."""
    at, is_module = begin, False
    while at < len(argv) and argv[at].startswith("-"):
        option = argv[at]
        at += 1
        if option == "--":
            break
        if is_module := option in ("-m", "--module") and option not in prefix.valued:
            break
        at += option in prefix.valued
    end = at - is_module
    at += prefix.arguments
    shown_prefix = shell_joined(argv[: end + prefix.arguments])
    if prefix.note:
        notes.append(prefix.note.format(shown=shown_prefix))
    rest = argv[at:]
    if is_module:
        return ["python", "-m", *rest]
    return ["python", *rest] if rest and rest[0].endswith(".py") else rest
