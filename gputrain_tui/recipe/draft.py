"""The form's model of a recipe: its fields, its unsaved changes and the errors of its values.

A change is a ``--set`` setting, so the same functions validate a form, the command line and a file. Pure: the schema of
a user's own task is passed in, because getting it takes a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from gputrain_tui.recipe import model
from gputrain_tui.recipe.form_fields import ENV, NODE_KEY, Field
from gputrain_tui.recipe.source import override, parse
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.recipe.values import check_env, inline_toml, parse_env, parse_gpus, parse_node_value, value_text
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import Option, check_value, describe

ONE_RANK = {"ranks": 1}
"""The node that a recipe without nodes gets when a second one is added."""


class Draft:
    """A recipe's text with its unsaved changes."""

    def __init__(self, text: str, *, name: str) -> None:
        """Start without changes; ``name`` is the file's name in messages."""
        self._text = text
        self.name = name
        self.changes: dict[str, Any] = {}
        self._source = parse(text, name=name)
        self._described: dict[str, Sequence[Option]] = {}
        """Schemas of users' own tasks, by name."""
        self._undo: list[tuple[str, dict[str, Any], str]] = []
        """For each edit its key, and changes and text before it."""

    @property
    def text(self) -> str:
        """The recipe's text, without the changes."""
        return self._text

    @property
    def settings(self) -> list[str]:
        """The changes as arguments of ``--set``."""
        return [f"{key}={inline_toml(value)}" for key, value in self.changes.items()]

    @property
    def data(self) -> dict[str, Any]:
        """The recipe's values with the changes, not validated."""
        return override(self._source.data, self.settings)[0]

    @property
    def task(self) -> str:
        """The task's name; empty if there is none."""
        return _task_of(self.data)

    def _unknown_keys(self, data: Mapping[str, Any]) -> list[str]:
        """Return the keys that the recipe has and its task or script does not take."""
        unknown = _loop_keys_of_others(data)
        options = () if _has_script(data) else self._task_options(_task_of(data))
        if options is None:
            return unknown
        known = {option.name for option in options}
        return [*unknown, *(f"task.{name}" for name in _table(data, "task") if name not in known)]

    def add_task(self, task: str, options: Sequence[Option]) -> None:
        """Add the options of a user's own task."""
        self._described[task] = options

    # Fields

    def fields(self) -> list[Field]:
        """Return all fields in the order of the form."""
        data = self.data

        def of(table: str, options: Iterable[Option], group: str = "") -> list[Field]:
            return [self._field(data, f"{table}.{option.name}", group or option.group, option) for option in options]

        name = Option(name="name", kind="str", help="names the run", default=self._source.default_name)
        launch = {option.name: option for option in describe(Distributed)}
        loop = {option.name: option for option in describe(Training)}
        task = loop.pop("task")
        unknown = self._unknown_keys(data)
        if _has_script(data):
            chosen = of("train", describe(Script), "Script")
            loop = {name: option for name, option in loop.items() if f"train.{name}" in unknown}
        else:
            chosen = [*of("train", [task], "Task"), *of("task", self._task_options(self.task) or (), "Task")]
        foreign = [
            Option(name=key.removeprefix("task."), kind="str", help="not an option of this recipe; Reset removes it")
            for key in unknown
            if key.startswith("task.")
        ]
        return [
            self._field(data, "name", "Recipe", name),
            *chosen,
            *of("task", foreign, "Task"),
            *self._node_fields(data),
            *of("cluster", (*describe(model.ClusterOptions), ENV), "Cluster"),
            *of("train", (launch[name] for name in model.LAUNCH_OPTIONS), "Cluster"),
            *of("slurm", describe(model.SlurmOptions), "Slurm"),
            *of("train", loop.values()),
            *of("report", describe(model.ReportOptions)),
        ]

    def _field(self, data: Any, key: str, group: str, option: Option) -> Field:
        value = _value_at(data, key)
        return Field(
            key=key,
            group=group,
            option=option,
            value=option.default if value is None else value,
            written=value is not None,
            changed=key in self.changes,
        )

    def _task_options(self, task: str) -> Sequence[Option] | None:
        return describe_task(task) if task in BUILT_IN else self._described.get(task)

    def _node_fields(self, data: Any) -> list[Field]:
        saved = self.nodes(self._source.data)
        fields = []
        for index, node in enumerate(self.nodes(data)):
            before = saved[index] if index < len(saved) else {}
            for option in (*describe(model.NodeOptions), ENV):
                value = node.get(option.name)
                fields.append(
                    Field(
                        key=f"cluster.nodes[{index}].{option.name}",
                        group=f"Node {index}",
                        option=option,
                        value=value,
                        written=value is not None,
                        changed=value != before.get(option.name),
                    )
                )
        return fields

    def nodes(self, data: Any = None) -> list[dict[str, Any]]:
        """Return the values of each node; one node without values, this machine, if the recipe has none."""
        nodes = _value_at(self.data if data is None else data, "cluster.nodes")
        if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
            return [{}]
        return [dict(node) for node in nodes]

    # Changes

    def set(self, key: str, text: str) -> list[str]:
        """Set a field to typed text without validation; empty text removes the key, which means its default.

        Returns the keys that were removed because they belong to the task or script that was replaced by this.
        """
        return self._edit(key, lambda: self._set(key, text))

    def undo(self) -> str | None:
        """Undo the last edit since the recipe was opened or saved; return its key, None if there is no edit."""
        if not self._undo:
            return None
        key, self.changes, text = self._undo.pop()
        self._put_text(text)
        return key

    def _put_text(self, text: str) -> None:
        if text != self._text:
            self._text, self._source = text, parse(text, name=self.name)

    def _edit(self, key: str, change: Callable[[], None]) -> list[str]:
        """Run a function that changes the recipe, and record the edit for ``undo``.

        Another task or script begins with its defaults. Returns the keys that are removed for that.
        """
        before = dict(self.changes), self._text
        kind = _kind(self.data)
        change()
        removed = self._keys_of_others() if _kind(self.data) != kind else []
        self.changes = {key: value for key, value in self.changes.items() if key not in removed}
        self._put_text(_without_keys(self._text, self._source.format, removed))
        if (self.changes, self._text) != before:
            self._undo.append((key, *before))
        return removed

    def _keys_of_others(self) -> list[str]:
        """Return all options of tasks, and the keys of ``[train]`` that the recipe's task or script does not take."""
        data = self.data
        return [*_loop_keys_of_others(data), *(f"task.{name}" for name in _table(data, "task"))]

    def _set(self, key: str, text: str) -> None:
        node = NODE_KEY.fullmatch(key)
        if node is None:
            if not text:
                self._reset(key)  # the change, if there is one
                self._reset(key)  # the key in the recipe
            elif (saved := _value_at(self._source.data, key)) is not None and text == value_text(saved):
                self.changes.pop(key, None)
            else:
                self.changes[key] = parse_env(text) if key == "cluster.env" else text
            return
        nodes = self.nodes()
        entry = nodes[int(node[1])]
        entry.pop(node[2], None)
        if text:
            for rank_key in model.RANK_KEYS if node[2] in model.RANK_KEYS else ():
                entry.pop(rank_key, None)
            entry[node[2]] = parse_node_value(node[2], text)
        self._put_nodes(nodes)

    def _put_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Replace the nodes; equal ones to those of the text are no change."""
        if list(nodes) == self.nodes(self._source.data):
            self.changes.pop("cluster.nodes", None)
        else:
            self.changes["cluster.nodes"] = [dict(node) for node in nodes]

    def reset(self, key: str) -> None:
        """Undo the change of a key; if it has none, remove the key from the recipe, which means its default."""
        self._edit(key, lambda: self._reset(key))

    def _reset(self, key: str) -> None:
        node = NODE_KEY.fullmatch(key)
        if node is not None:
            nodes = self.nodes()
            written = self._source.data.get("cluster", {}).get("nodes", [])
            index, name = int(node[1]), node[2]
            before = written[index] if index < len(written) else {}
            if nodes[index] != before and index < len(written):
                nodes[index] = dict(before)
            else:
                nodes[index].pop(name, None)
            self._put_nodes(nodes)
        elif key in self.changes:
            del self.changes[key]
        else:
            self._put_text(_without_keys(self._text, self._source.format, (key,)))

    def add_node(self) -> int:
        """Add a node like the last one; return its index."""
        nodes = self.nodes()
        last = {key: value for key, value in nodes[-1].items() if key != "host"}
        added = [*(node or ONE_RANK for node in nodes), last or ONE_RANK]
        self._edit(f"cluster.nodes[{len(nodes) - 1}].host", lambda: self._put_nodes(added))
        return len(nodes)

    def remove_node(self, index: int) -> bool:
        """Remove a node; return False for the only node, which stays."""
        nodes = self.nodes()
        if len(nodes) < 2:
            return False
        del nodes[index]
        if nodes == [ONE_RANK] and self.nodes(self._source.data) == [{}]:
            nodes = [{}]  # as before the second node was added
        self._edit(f"cluster.nodes[{max(index - 1, 0)}].host", lambda: self._put_nodes(nodes))
        return True

    def set_gpus(self, index: int, gpus: Sequence[int]) -> None:
        nodes = self.nodes()
        nodes[index] = {key: value for key, value in nodes[index].items() if key not in model.RANK_KEYS} | {
            "gpus": [*gpus]
        }
        self.set_nodes(nodes)

    def set_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        self._edit("cluster.nodes[0].gpus", lambda: self._put_nodes(nodes))

    def mark_saved(self, text: str, *, name: str) -> None:
        """Continue from a saved text, without changes and edits to undo."""
        self._text, self.name = text, name
        self._source = parse(text, name=name)
        self.changes.clear()
        self._undo.clear()

    # Errors

    def problem(self, field: Field, text: str) -> str:
        """Return the error of a text as the value of a field, without regard to other fields; empty if it is valid."""
        node = NODE_KEY.fullmatch(field.key)
        try:
            if node is not None and not text:
                return ""
            if field.option is ENV:
                values = parse_env(text)
                if isinstance(values, str):
                    return f"env is {text!r}, but must be NAME=VALUE pairs separated by spaces, quoted as in a shell"
                check_env(values, where=lambda *key: ".".join(key))
            elif field.name == "gpus" and node is not None:
                parse_gpus(parse_node_value("gpus", text), where=field.name)
            else:
                check_value(field.option, text, where=field.option.name)
        except RequestError as error:
            return str(error)
        return ""


def _value_at(data: Any, key: str) -> Any:
    """Return the value of a key without list positions; None if it is absent."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a recipe; an empty one for another value."""
    table = data.get(name)
    return table if isinstance(table, Mapping) else {}


def _task_of(data: Mapping[str, Any]) -> str:
    task = _table(data, "train").get("task", "")
    return task if isinstance(task, str) else ""


def _has_script(data: Mapping[str, Any]) -> bool:
    return "script" in _table(data, "train")


def _loop_keys_of_others(data: Mapping[str, Any]) -> list[str]:
    """Return the keys of ``[train]`` that only a task takes where the recipe has a script, or the other way round."""
    other = Training if _has_script(data) else Script
    return [f"train.{name}" for name in _table(data, "train") if name in other.__struct_fields__]


def _kind(data: Mapping[str, Any]) -> tuple[str, bool]:
    return _task_of(data), _has_script(data)


def _without_keys(text: str, format: Literal["toml", "json"], keys: Sequence[str]) -> str:
    """Return a recipe's text without some keys; the rest keeps its comments."""
    if not keys:
        return text
    import tomlkit  # slow to import, and only needed here

    document: Any = tomlkit.parse(text) if format == "toml" else json.loads(text)
    removed = False
    for key in keys:
        table, _, name = key.rpartition(".")
        holder = document.get(table, {}) if table else document
        if name in holder:
            del holder[name]
            removed = True
            if table == "slurm" and not holder:
                del document["slurm"]  # an empty table would still submit the run to Slurm
    if not removed:
        return text
    return tomlkit.dumps(document) if format == "toml" else json.dumps(document, indent=2, ensure_ascii=False) + "\n"
