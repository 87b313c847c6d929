"""Words in front of a launch command: settings of variables, ``uv run``, ``nohup``, ``taskset`` and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gputrain_tui.recipe.shell_text import ASSIGNMENT, read_pasted_command, shown, shown_command
from gputrain_tui.recipe.srun import SlurmStep, read_srun
from trainer.contract.errors import RequestError, quoted

_SAME_ENVIRONMENT = "{shown} is left out: start gputrain itself with it ({shown} gputrain run …), as ranks inherit it"
_INHERITED = "{shown} is left out: put it before gputrain run, whose ranks on this machine inherit it"
_CONDA = ("-n", "--name", "-p", "--prefix", "--cwd")
_MAMBA = (*_CONDA, "-r", "--root-prefix", "-a", "--attach", "-e", "--env", "--label", "--rc-file")
ENVIRONMENTS = {
    "uv": (
        *("-w", "--with", "--with-editable", "--with-requirements", "--extra", "--no-extra", "--group", "--no-group"),
        *("--only-group", "--no-editable-package", "--env-file", "--package", "--python-platform", "--index"),
        *("--default-index", "-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--index-strategy"),
        *("--keyring-provider", "-P", "--upgrade-package", "--upgrade-group", "--resolution", "--prerelease"),
        *("--prerelease-package", "--fork-strategy", "--exclude-newer", "--exclude-newer-package"),
        *("--no-sources-package", "--reinstall-package", "--link-mode", "-C", "--config-setting"),
        *("--config-settings-package", "--no-build-isolation-package", "--no-build-package", "--no-binary-package"),
        *("--cache-dir", "--refresh-package", "-p", "--python", "--color", "--allow-insecure-host", "--directory"),
        *("--project", "--config-file"),
    ),
    "poetry": ("-C", "--directory", "-P", "--project"),
    "pdm": ("-p", "--project", "-c", "--config", "--venv"),
    "pipenv": ("--python", "--pypi-mirror"),
    "rye": ("--pyproject",),
    "hatch": (
        *("-e", "--env", "-p", "--project", "--data-dir", "--cache-dir", "--config"),
        *("-i", "--include", "-x", "--exclude", "-f", "--filter"),
    ),
    "pixi": ("-e", "--environment", "-m", "--manifest-path", "-w", "--workspace", "--color"),
    "conda": _CONDA,
    "mamba": _MAMBA,
    "micromamba": _MAMBA,
}
"""Programs whose ``run`` starts a command in an environment of Python → their options with a value."""
OPTIONS = {
    **ENVIRONMENTS,
    "env": ("-u", "--unset", "-C", "--chdir"),
    "time": ("-o", "--output", "-f", "--format"),
    "exec": ("-a",),
}
"""Options whose value, the next word, may read as a command or a setting."""
PREFIXES = {
    **dict.fromkeys(ENVIRONMENTS, _SAME_ENVIRONMENT),
    **dict.fromkeys(("nice", "ionice", "numactl", "taskset", "timeout", "env"), _INHERITED),
    **dict.fromkeys(("nohup", "setsid"), "{shown} is left out: `gputrain run --detach` outlives its terminal"),
    **dict.fromkeys(("exec", "command", "time", "unbuffer", "stdbuf"), ""),
}
"""Programs in front of a launcher → the note about each; ``shown`` is what was typed up to the next command."""
_COMMAND = re.compile(r"python[\d.]*|torchrun|accelerate(-launch)?|deepspeed|fabric|lightning|srun|bash|sh|.+\.py")
"""A name that begins a command; what stands between it and a prefix, but ``ENVIRONMENTS``, is the prefix's."""


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
    at = _length_of_environment(name, argv) if name in ENVIRONMENTS else 1
    while name not in ENVIRONMENTS and at < len(argv) and not _begins_command(argv[at]):
        at += 2 if argv[at] in OPTIONS.get(name, ()) else 1
    if PREFIXES[name] and (name != "env" or at > 1):
        notes.append(PREFIXES[name].format(shown=shown_command(argv[:at])))
    rest = argv[at:]
    if rest and rest[0] in ("-m", "--module"):
        return ["python", "-m", *rest[1:]]
    return ["python", *rest] if rest and rest[0].endswith(".py") else rest


def _length_of_environment(name: str, argv: list[str]) -> int:
    """Return how many words ``NAME run`` and its options are."""
    at, is_run = 1, False
    while at < len(argv):
        word = argv[at]
        if is_run and (not word.startswith("-") or (name == "uv" and word in ("-m", "--module"))):
            break
        if not is_run and not word.startswith("-"):
            if word != "run":
                raise RequestError(f"{name} {quoted(shown(word))} starts no training: give init {name} run COMMAND")
            is_run = True
        at += 2 if word in OPTIONS[name] else 1
    return min(at, len(argv))


def _begins_command(word: str) -> bool:
    name = PurePath(word).name
    return bool(name in PREFIXES or _COMMAND.fullmatch(name) or ASSIGNMENT.fullmatch(word))
