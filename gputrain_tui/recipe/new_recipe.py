"""Writes the text of a new recipe, with comments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import tomlkit

from gputrain_tui.recipe.command_launchers import LaunchCommand
from trainer.contract.errors import printable

COMMENTS = {
    "host": "name for ssh; without it: this machine",
    "gpus": 'a count, a list of ids, "all", or "free" (GPUs not in use); or cpu_ranks = 2',
    "ranks": 'on GPUs where the machine has any, else on its CPU; or gpus = "all", cpu_ranks = 2',
    "cpu_ranks": 'ranks on the CPU, over gloo; on GPUs: gpus = "all"',
    "init_method": "rendezvous of the ranks; without it gputrain chooses one",
    "max_restarts": "after a failure, from the last checkpoint",
    "python": "the interpreter of the command",
    "env": "environment variables of all ranks",
    "module": "script is a module's name, run as with python -m",
    "local_rank_flag": "the launcher's flag with the local rank; scripts that read LOCAL_RANK need none",
    "script": "relative to the folder in which gputrain is started",
    "task": "its other options: python -m trainer --task {value} --help",
}
"""Comments of a new recipe, by key."""

MAX_INLINE_VARIABLES = 2
"""Environment variables on one line of a recipe; more are a table."""

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
        cluster, env = dict(self.cluster), self.cluster.get("env", {})
        if len(env) > MAX_INLINE_VARIABLES:
            del cluster["env"]
        tables: list[tuple[str, Mapping[str, Any]]] = [("[cluster]", cluster)] if cluster else []
        tables += [("[cluster.env]", env)] if len(env) > MAX_INLINE_VARIABLES else []
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
    train: dict[str, Any] = {"script": command.script}
    if command.module:
        train["module"] = True
    if command.local_rank_flag is not None:
        train["local_rank_flag"] = command.local_rank_flag
    if command.args:
        train["args"] = command.args
    return NewRecipe(
        name=(command.script.rpartition(".")[2] if command.module else PurePath(command.script).stem) or "recipe",
        origin=typed,
        nodes=command.nodes,
        train=train,
        cluster=cluster,
        notes=tuple(map(printable, command.notes)),
    )


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
