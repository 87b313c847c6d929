"""Words in front of a launch command: settings of variables, ``uv run``, ``nohup``, ``taskset`` and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gputrain_tui.recipe.shell_text import ASSIGNMENT, read_pasted_command, shown
from gputrain_tui.recipe.srun import SlurmStep, read_srun
from gputrain_tui.shell_words import shell_joined
from trainer.contract.errors import RequestError

_SAME_ENVIRONMENT = "{shown} is left out: start gputrain itself with it ({shown} gputrain run …), as ranks inherit it"
_INHERITED = "{shown} is left out: put it before gputrain run, whose ranks on this machine inherit it"
ENVIRONMENTS = ("uv", "poetry", "pdm", "pipenv", "rye", "hatch", "pixi", "conda", "mamba", "micromamba")
"""Programs that start a command in an environment of Python."""
PREFIXES = {
    **dict.fromkeys(ENVIRONMENTS, _SAME_ENVIRONMENT),
    **dict.fromkeys(("nice", "ionice", "numactl", "taskset", "timeout", "env"), _INHERITED),
    **dict.fromkeys(("nohup", "setsid"), "{shown} is left out: `gputrain run --detach` outlives its terminal"),
    **dict.fromkeys(("exec", "command", "time", "unbuffer", "stdbuf"), ""),
}
"""Programs in front of a launcher → the note about each; ``shown`` is what was typed up to the next command."""
_COMMAND = re.compile(r"python[\d.]*|torchrun|accelerate(-launch)?|deepspeed|fabric|lightning|srun|bash|sh|.+\.py")
"""A name that begins a command; all that stands between a prefix and it are the prefix's own words."""


@dataclass(kw_only=True)
class Prefixed:
    """A launch command without the words in front of it."""

    argv: list[str]
    typed: list[str]
    """All words, those of ``bash -c`` among them."""
    env: dict[str, str] = field(default_factory=dict)
    slurm: SlurmStep | None = None
    """What ``srun`` says; None without one."""
    notes: list[str] = field(default_factory=list)


def read_prefixes(argv: Sequence[str]) -> Prefixed:
    """Split a command into what stands in front of its launcher, and the launcher with its words."""
    found = Prefixed(argv=list(argv), typed=list(argv))
    while found.argv:
        rest = found.argv
        name = PurePath(rest[0]).name
        if (setting := ASSIGNMENT.fullmatch(rest[0])) is not None:
            found.env[setting[1]] = setting[2]
            found.argv = rest[1:]
        elif name == "srun":
            if found.slurm is not None:
                raise RequestError("the command has srun twice: a recipe is for one step of each node")
            found.slurm, found.argv = read_srun(rest[1:])
            found.env |= found.slurm.env
        elif name in ("bash", "sh") and len(rest) == 3 and rest[1] in ("-c", "-lc", "-ec"):
            pasted = read_pasted_command(shown(rest[2]))
            found.argv = pasted.argv
            found.typed[-len(rest) :] = pasted.argv
            found.notes += pasted.notes
        elif name in PREFIXES:
            found.argv = _after_prefix(name, rest, found.notes)
        else:
            break
    return found


def _after_prefix(name: str, argv: list[str], notes: list[str]) -> list[str]:
    """Return the words from the next command or setting on; a Python file or module gets its ``python`` back."""
    at = 1
    while at < len(argv) and not _begins_command(argv[at], in_environment=name in ENVIRONMENTS):
        at += 1
    if PREFIXES[name] and (name != "env" or at > 1):
        notes.append(PREFIXES[name].format(shown=shell_joined(argv[:at])))
    rest = argv[at:]
    return ["python", *rest] if rest and rest[0].endswith((".py", "-m")) else rest


def _begins_command(word: str, *, in_environment: bool) -> bool:
    name = PurePath(word).name
    is_command = name in PREFIXES or _COMMAND.fullmatch(name) or ASSIGNMENT.fullmatch(word)
    return bool(is_command) or (in_environment and word == "-m")
