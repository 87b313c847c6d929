"""Writes the text of a new recipe, with comments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import tomlkit

from gputrain_tui.recipe.launch_command import LaunchCommand, read_launch_command, split_command
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from gputrain_tui.shell_words import shell_joined
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError, nearest, printable, quoted

COMMENTS = {
    "host": "name for ssh; without it: this machine",
    "gpus": 'a count, a list of ids, "all", or "free" (GPUs not in use); or cpu_ranks = 2',
    "ranks": 'on GPUs where the machine has any, else on its CPU; or gpus = "all", cpu_ranks = 2',
    "cpu_ranks": 'ranks on the CPU, over gloo; on GPUs: gpus = "all"',
    "init_method": "rendezvous of the ranks; without it gputrain chooses one",
    "max_restarts": "after a failure, from the last checkpoint",
    "python": "the interpreter of the command",
    "env": "environment variables of all ranks",
    "script": "relative to the folder in which gputrain is started",
    "task": "its other options: python -m trainer --task {value} --help",
}
"""Comments of a new recipe, by key."""

REPORT = """\
# [report]                # other places to report the run to
# tensorboard = true      # event files in the run directory; or a folder, such as "runs"
# wandb = "project"
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
        tables = [("[cluster]", self.cluster)] if self.cluster else []
        tables += [("[[cluster.nodes]]", node) for node in self.nodes]
        tables += [("[train]", self.train)]
        tables += [("[task]", self.task)] if self.task else []
        commented = set[str]()
        for title, table in tables:
            lines += [title, *(_line(key, value, commented) for key, value in table.items()), ""]
        return "\n".join(lines) + "\n" + REPORT


def from_command(command: LaunchCommand, *, typed: str) -> NewRecipe:
    """Return the recipe of a launch command; ``typed``: the command on one line."""
    cluster = {**command.cluster, **({"env": command.env} if command.env else {})}
    train = {"script": command.script, **({"args": command.args} if command.args else {})}
    return NewRecipe(
        name=PurePath(command.script).stem or "recipe",
        origin=typed,
        nodes=command.nodes,
        train=train,
        cluster=cluster,
        notes=tuple(map(printable, command.notes)),
    )


def from_words(words: Sequence[str], *, is_secret: Callable[[str], bool]) -> NewRecipe:
    """Return the recipe of a launch command; ``is_secret``: whether an environment variable is one, by its name.

    Raises:
        RequestError: the command cannot be translated.
    """
    command = read_launch_command(words, read_file=_read_file, is_secret=is_secret)
    shown = [re.sub(r"=.*", "=…", word) if is_secret(word.partition("=")[0]) else word for word in words]
    return from_command(command, typed=shell_joined(shown))


def from_text(text: str, *, is_secret: Callable[[str], bool]) -> NewRecipe:
    """Return the recipe of a task's name, of a script with its arguments, or of a launch command.

    Required options of a task are left to be set: its recipe is incomplete without them.

    Raises:
        RequestError: the text is none of these.
    """
    words = split_command(text)
    first = words[0]
    if first.endswith(".py"):
        return from_words(["python", *words], is_secret=is_secret)
    if len(words) > 1:
        return from_words(words, is_secret=is_secret)
    if first not in BUILT_IN and ":" not in first:
        raise RequestError(f"{quoted(first)} is neither a Python file nor a task{nearest(first, BUILT_IN)}")
    name = Path(first.partition(":")[0]).stem
    return NewRecipe(name=name, origin="", nodes=[{"ranks": 1}], train={"task": first, "max_epochs": 1})


def file_name(name: str) -> str:
    """Return the file name of a recipe with this name."""
    return (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "recipe") + ".toml"


def _read_file(name: str) -> str:
    with Path(name).expanduser().open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_RECIPE_BYTES)


def _line(key: str, value: Any, commented: set[str] | None = None) -> str:
    """Return a line of TOML, with the key's comment if the set ``commented`` is given and lacks the key; add it."""
    if isinstance(value, Mapping):
        inner = tomlkit.inline_table()
        inner.update(value)
        value = inner
    text = f"{key} = {tomlkit.item(value).as_string()}"
    if commented is None or key in commented or key not in COMMENTS:
        return text
    commented.add(key)
    return f"{text:<24}  # {COMMENTS[key].format(value=value)}"
