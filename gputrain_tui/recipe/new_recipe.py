"""Writes the text of a new recipe, with comments; the example recipes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import tomlkit

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch, ask_accelerate
from gputrain_tui.recipe.allow_list import AllowList
from gputrain_tui.recipe.command_launchers import LaunchCommand
from gputrain_tui.recipe.launch_command import read_launch_command
from gputrain_tui.recipe.shell_text import read_pasted_command, shown_command
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from gputrain_tui.recipe.trainer_command import read_trainer_command
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError, nearest, printable, quoted

COMMENTS = {
    "host": "name for ssh; without it: this machine",
    "gpus": 'a count, a list of ids, "all", or "free" (GPUs not in use); or cpu_ranks = 2',
    "ranks": 'on GPUs where the machine has any, else on its CPU; or gpus = "all", cpu_ranks = 2',
    "cpu_ranks": 'ranks on the CPU, over gloo; on GPUs: gpus = "all"',
    "init_method": "rendezvous of the ranks; without it gputrain chooses one",
    "max_restarts": "after a failure; a script must load its last checkpoint",
    "python": "the interpreter of the command",
    "env": "environment variables of all ranks",
    "module": "script is a module's name, run as with python -m",
    "local_rank_flag": "the launcher's flag with the local rank; scripts that read LOCAL_RANK need none",
    "starts_ranks": "the script is started once on each node, and starts the ranks itself",
    "script": "relative to the folder in which gputrain is started",
    "task": "its other options: python -m trainer --task {value} --help",
}

ONE_RANK = dict.fromkeys(("ranks", "gpus", "cpu_ranks"), "more than one: only once the script makes a process group")
"""Comments in their place where the script makes no process group."""
MAX_INLINE_VARIABLES = 2
"""Environment variables on one line of a recipe; more are a table."""
REPORT = """\
# [report]                # other places to report the run to
# tensorboard = true      # event files in the run directory; or a folder, such as "runs"
# wandb = "project"
# on_finding = "echo $GPUTRAIN_FINDING_KIND $GPUTRAIN_FINDING_MESSAGE"  # when something is found, or over
# on_end = "echo $GPUTRAIN_RUN_NAME $GPUTRAIN_RUN_STATUS"  # a shell command at the end
"""


@dataclass(frozen=True, kw_only=True)
class NewRecipe:
    """Contents of a recipe that is to be written."""

    name: str
    origin: str
    """The launch command that it comes from; empty if the user answered questions instead."""
    nodes: list[dict[str, Any]]
    train: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    slurm: Mapping[str, Any] = field(default_factory=dict)
    makes_group: bool | None = None
    """Whether the script makes a process group; None if that is unknown."""
    notes: tuple[str, ...] = ()
    """A line for each part of the command that the recipe lacks, or that the user has to complete."""

    def text(self, *, file: str) -> str:
        """Return the recipe as TOML; its first comment has the commands for ``file``."""
        head = [f"From: {self.origin}", ""] if self.origin else []
        head += [f"    gputrain check {printable(file)}", f"    gputrain run {printable(file)}"]
        if self.notes:
            head += ["", *(f"- {note}" for note in self.notes)]
        lines = [f"# {line}".rstrip() for line in head]
        lines += [_line("name", self.name), ""]
        cluster, env = dict(self.cluster), self.cluster.get("env", {})
        if len(env) > MAX_INLINE_VARIABLES:
            del cluster["env"]
        tables: list[tuple[str, Mapping[str, Any]]] = [("[slurm]", self.slurm)] if self.slurm else []
        tables += [("[cluster]", cluster)] if cluster else []
        tables += [("[cluster.env]", env)] if len(env) > MAX_INLINE_VARIABLES else []
        tables += [("[[cluster.nodes]]", node) for node in self.nodes]
        tables += [("[train]", self.train)]
        tables += [("[task]", self.task)] if self.task else []
        comments = COMMENTS | (ONE_RANK if self.makes_group is False else {})
        if self.train.get("module"):
            del comments["script"]
        for title, table in tables:
            lines += [title, *(_line(key, value, comments) for key, value in table.items()), ""]
        return "\n".join(lines) + "\n" + REPORT


def from_command(command: LaunchCommand, *, typed: str) -> NewRecipe:
    """Return the recipe of a launch command; ``typed``: the command on one line."""
    if command.trains_a_task:
        return _from_trainer(command, typed=typed)
    names = ("script", "module", "local_rank_flag", "args", "starts_ranks")
    train = {name: value for name in names if (value := getattr(command, name))}
    cluster = {**command.cluster, **({"env": command.env} if command.env else {})}
    return NewRecipe(
        name=(command.script.rpartition(".")[2] if command.module else PurePath(command.script).stem) or "recipe",
        origin=typed,
        nodes=command.nodes,
        train=train,
        cluster=cluster,
        slurm=command.slurm,
        makes_group=command.makes_group,
        notes=tuple(map(printable, command.notes)),
    )


def _from_trainer(command: LaunchCommand, *, typed: str) -> NewRecipe:
    tables = read_trainer_command(command.args)
    starts_itself = command.nodes == [{"ranks": 1}]
    notes = [note for note in command.notes if not note.startswith("python starts one process")]
    cluster = {**command.cluster, **tables.cluster, **({"env": command.env} if command.env else {})}
    return NewRecipe(
        name=Path(tables.train["task"].partition(":")[0]).stem,
        origin=typed,
        nodes=[tables.node] if starts_itself else command.nodes,
        train=tables.train,
        task=tables.task,
        cluster=cluster,
        notes=tuple(map(printable, [*notes, *tables.notes])),
    )


def from_argv(argv: Sequence[str], *, notes: Sequence[str] = ()) -> NewRecipe:
    """Return the recipe of a launch command; ``notes`` are those about its text."""
    command = read_launch_command(argv, read_file=read_text_file, ask_accelerate=_ask_accelerate)
    command.notes = [*notes, *command.notes]
    return from_command(command, typed=_shown(command))


def from_pasted(text: str) -> NewRecipe:
    """Return the recipe of the one launch command in a pasted text."""
    pasted = read_pasted_command(text)
    return from_argv(pasted.argv, notes=pasted.notes)


def _shown(command: LaunchCommand) -> str:
    """Return a command on one line, with only those values of variables and of the script's arguments that are shown.

    A comment stays in copies of the recipe from which its values have been removed.
    """
    allow = AllowList({}, Path.cwd())
    first_argument = len(command.typed) - command.typed_arguments
    before = [
        re.sub(
            r"(^|[=,])([A-Za-z_]\w*)=([^,]*)"
            if word.startswith("--export=")
            else r"(^)([A-Za-z_]\w*)=(?!=)(.*)",  # == is a version that uv run --with wants
            lambda setting: f"{setting[1]}{setting[2]}={allow.variables({setting[2]: setting[3]})[setting[2]]}",
            word,
            flags=re.DOTALL,
        )
        for word in command.typed[:first_argument]
    ]
    return shown_command([*before, *allow.arguments(command.typed[first_argument:])])


def from_text(text: str) -> NewRecipe:
    """Return the recipe of a task's name, of a script with its arguments, or of a launch command.

    Required options of a task are left to be set: its recipe is incomplete without them.
    """
    pasted = read_pasted_command(text)
    argv, first = pasted.argv, pasted.argv[0]
    if first.endswith(".py") or len(argv) > 1:
        new = from_argv(["python", *argv] if first.endswith(".py") else argv, notes=pasted.notes)
        if "module" not in new.train:
            _require_file(new.train["script"])
        return new
    if first not in BUILT_IN and ":" not in first:
        raise RequestError(f"{quoted(first)} is neither a Python file nor a task{nearest(first, BUILT_IN)}")
    if (file := first.rpartition(":")[0]).endswith(".py"):
        _require_file(file)
    name = Path(first.partition(":")[0]).stem
    return NewRecipe(name=name, origin="", nodes=[{"ranks": 1}], train={"task": first, "max_epochs": 1})


def _require_file(name: str) -> None:
    """Require a Python file that exists, relative to the working folder."""
    path = Path(name).expanduser()
    if path.is_file():
        return
    files = [*Path().glob("*.py"), *Path().glob("*/*.py"), *path.parent.glob("*.py")]
    same = next((file for file in files if file.name == path.name), None)
    guess = f"; did you mean {str(same)!r}?" if same is not None else nearest(name, map(str, files))
    raise RequestError(f"{quoted(name)} does not exist in {printable(str(Path.cwd()))}{guess}")


def file_name(name: str) -> str:
    """Return the file name of a recipe with this name."""
    return (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "recipe") + ".toml"


def _ask_accelerate(python: str | None, argv: Sequence[str]) -> AccelerateLaunch:
    """Ask the accelerate that the command names, else the one that ``accelerate`` would start, else that of here."""
    program = None if python else shutil.which("accelerate")
    return ask_accelerate(python or (str(Path(program).with_name("python")) if program else sys.executable), argv)


def read_text_file(name: str) -> str:
    """Return the text of a file that a command names, or its beginning."""
    with Path(name).expanduser().open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_RECIPE_BYTES)


def _line(key: str, value: Any, comments: dict[str, str] | None = None) -> str:
    """Return a line of TOML, with the key's comment if there is one left in ``comments``; remove it there."""
    if isinstance(value, Mapping):
        inner = tomlkit.inline_table()
        inner.update(value)
        value = inner
    text = f"{key} = {tomlkit.item(value).as_string()}"
    comment = None if comments is None else comments.pop(key, None)
    return text if comment is None else f"{text:<24}  # {comment.format(value=value)}"


FOLDERS = (Path(__file__).with_name("examples"), Path(__file__).parents[2] / "recipes")
"""The folder in an installed package, and that of the repository."""
SCRIPT = "train_script.py"
"""The script that the example ``script`` trains, in the same folder."""


def examples_folder() -> Path:
    """Return the folder of the examples."""
    return next((path for path in FOLDERS if path.is_dir()), FOLDERS[0])


def example_names() -> list[str]:
    """Return the names of the examples, in alphabetical order."""
    return sorted(path.stem for path in examples_folder().glob("*.toml"))


def example_path(name: str) -> Path:
    """Return the file of an example."""
    names = example_names()
    if name not in names:
        raise RequestError(
            f"init: {quoted(name)} is not an example{nearest(name, names) or '; there are ' + ', '.join(names)}"
        )
    return examples_folder() / f"{name}.toml"


def example_text(name: str, *, file: str, script: str) -> str:
    """Return an example as it reads outside the repository, with its own ``file`` and its copy of ``script``."""
    text = example_path(name).read_text(encoding="utf-8").replace(f"recipes/{SCRIPT}", script)
    return re.sub(r"\A#:schema .*\n", "", text).replace(f"recipes/{name}.toml", file)
