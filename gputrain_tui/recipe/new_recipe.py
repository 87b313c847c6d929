"""Writes the commented text of a new recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import tomlkit

from gputrain_tui.recipe.launch_command import LaunchCommand
from trainer.contract.errors import printable

COMMENTS = {
    "host": "as ssh takes it; without one it is this machine",
    "gpus": 'a count, a list of ids, "all", or "free": those that nobody uses; or cpu_ranks = 2',
    "ranks": 'on GPUs where the machine has any, else on its CPU; or gpus = "all", cpu_ranks = 2',
    "cpu_ranks": 'processes that meet over gloo; with GPUs: gpus = "all"',
    "init_method": "where the ranks meet; without it a port is chosen",
    "max_restarts": "after a failure, from the last checkpoint",
    "python": "the interpreter of the command",
    "env": "environment variables of all ranks",
    "script": "relative to the folder in which gputrain is typed",
    "task": "its other options: python -m trainer --task {value} --help",
}
"""By key; what a person would ask about it."""

REPORT = """\
# [report]                # where else the run is reported, while it goes on
# tensorboard = true      # event files in the run directory; or a folder, such as "runs"
# wandb = "project"
# on_end = "echo $GPUTRAIN_RUN_NAME $GPUTRAIN_RUN_STATUS"  # a shell command at the end
"""


@dataclass(frozen=True, kw_only=True)
class NewRecipe:
    """What a recipe will say."""

    name: str
    origin: str
    """The command that it is written from; empty where it was asked for."""
    nodes: list[dict[str, Any]]
    train: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """A line for each part of the command that is not in it."""

    def text(self, *, file: str) -> str:
        """Return the recipe as TOML that names its file."""
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
        said = set[str]()
        for title, table in tables:
            lines += [title, *(_line(key, value, said) for key, value in table.items()), ""]
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


def _line(key: str, value: Any, said: set[str] | None = None) -> str:
    """Return a line of TOML, with its comment where the key is there for the first time."""
    if isinstance(value, Mapping):
        inner = tomlkit.inline_table()
        inner.update(value)
        value = inner
    text = f"{key} = {tomlkit.item(value).as_string()}"
    if said is None or key in said or key not in COMMENTS:
        return text
    said.add(key)
    return f"{text:<24}  # {COMMENTS[key].format(value=value)}"
