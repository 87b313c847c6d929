"""The form's model of a recipe: its fields, unsaved changes and validation messages.

A change is a ``--set`` setting, so a form, the command line and a file are checked by the same functions. Pure: the
schema of a user's own task is passed in, because getting it takes a process.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gputrain_tui.recipe import model as recipes
from gputrain_tui.recipe.model import (
    LAUNCH_OPTIONS,
    RANK_KEYS,
    ClusterOptions,
    NodeOptions,
    Script,
    SlurmOptions,
    whole_number,
)
from gputrain_tui.recipe.report_options import ReportOptions
from gputrain_tui.recipe.source import override, parse
from gputrain_tui.recipe.task_schema import task_schema
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed, Training
from trainer.contract.schema import Option, check, describe

NODE_KEY = re.compile(r"cluster\.nodes\[(\d+)\]\.(\w+)")
MESSAGE_KEY = re.compile(r"(?:^|[: ])((?:name|cluster|slurm|train|task|report)(?:\.\w+|\[\d+\])*)(?=[\s:]|$)")
"""The first key that a message names."""
ENV = Option(name="env", kind="str", help="environment variables of the ranks, such as NCCL_DEBUG=INFO")
"""The table ``env`` of the cluster or of a node, as one line."""
PATH_NAMES = ("resume", "finetune_from", "eval_only", "script", "task", "workdir", "python")
PATH_ENDINGS = ("_path", "_dir", "_file", "_folder")
ONE_RANK = {"ranks": 1}
"""What a node runs where a recipe without nodes gets a second one."""
R = TypeVar("R")


@dataclass(frozen=True)
class FieldMessage:
    """A message shown beside a field instead of its help."""

    text: str
    status: Literal["note", "warning", "error"] = "error"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of a recipe as a form shows it."""

    key: str
    """As ``--set`` names it: ``train.lr``, ``cluster.nodes[0].gpus``."""
    group: str
    """Heading in a form."""
    option: Option
    value: Any
    """As written in the recipe; the default where the key is absent."""
    written: bool
    """Whether the recipe has the key."""
    changed: bool
    """Whether the value is not saved yet."""

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.key.rpartition(".")[2]

    @property
    def text(self) -> str:
        """The value as text for an input; empty for None."""
        return value_text(self.value)

    @property
    def is_path(self) -> bool:
        """Whether it may name a file: an option that is text and may differ between ranks is a path."""
        named = self.name in PATH_NAMES or self.name.endswith(PATH_ENDINGS)
        return self.option.kind == "str" and (self.option.per_rank or named)

    @property
    def values(self) -> tuple[str, ...]:
        """The choices; empty where any value of the kind is allowed."""
        if self.key == "train.task":
            return tuple(BUILT_IN)
        if self.option.kind == "bool":
            return ("true", "false")
        return tuple(map(str, self.option.choices))


def value_text(value: Any) -> str:
    """Return a value as text that ``--set`` or a form parses back; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return " ".join(f"{name}={shlex.quote(str(item))}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if any(isinstance(item, str) and set(item) & set(', []"') for item in value):
            return json.dumps(list(value))
        return ", ".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


class Draft:
    """A recipe's text with its unsaved changes."""

    def __init__(self, text: str, *, name: str) -> None:
        """Begin with a recipe as it is.

        Args:
            text: TOML or JSON.
            name: the file, for messages.

        Raises:
            RecipeError: the text is neither.
        """
        self.text = text
        self.name = name
        self.changes: dict[str, Any] = {}
        """Values by key, not saved yet."""
        self._source = parse(text, name=name)
        self._schemas: dict[str, type[Any]] = {}
        """By task, of users' own tasks."""
        self._undo: list[tuple[str, dict[str, Any], str]] = []
        """Per change its key, and changes and text of before."""

    @property
    def settings(self) -> list[str]:
        """The changes as ``--set`` takes them."""
        return [f"{key}={_inline_toml(value)}" for key, value in self.changes.items()]

    @property
    def data(self) -> dict[str, Any]:
        """The values, changes included, unchecked."""
        return override(self._source.data, self.settings)[0]

    @property
    def task(self) -> str:
        """The task's name; empty for none."""
        train = self.data.get("train")
        task = train.get("task", "") if isinstance(train, dict) else ""
        return task if isinstance(task, str) else ""

    def add_task_schema(self, task: str, schema: type[Any]) -> None:
        """Add the options of a user's own task."""
        self._schemas[task] = schema

    # Fields

    def fields(self) -> list[Field]:
        """Return every field in the order of a form."""
        data = self.data
        name = Option(name="name", kind="str", help="names the run", default=self._source.default_name)
        found = [self._field(data, "name", "Recipe", name)]
        found += self._task_fields(data)
        found += self._node_fields(data)
        found += [self._field(data, f"cluster.{o.name}", "Cluster", o) for o in (*describe(ClusterOptions), ENV)]
        launch = {option.name: option for option in describe(Distributed)}
        found += [self._field(data, f"train.{name}", "Cluster", launch[name]) for name in LAUNCH_OPTIONS]
        found += [self._field(data, f"slurm.{option.name}", "Slurm", option) for option in describe(SlurmOptions)]
        for option in describe(Training):
            if option.name != "task":
                found.append(self._field(data, f"train.{option.name}", option.group, option))
        found += [
            self._field(data, f"report.{option.name}", option.group, option) for option in describe(ReportOptions)
        ]
        return found

    def _field(self, data: Any, key: str, group: str, option: Option) -> Field:
        value: Any = data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        written = value is not None
        return Field(
            key=key,
            group=group,
            option=option,
            value=value if written else option.default,
            written=written,
            changed=key in self.changes,
        )

    def _task_fields(self, data: Any) -> list[Field]:
        task = next(option for option in describe(Training) if option.name == "task")
        found = [self._field(data, "train.task", "Task", task)]
        train = data.get("train")
        if isinstance(train, dict) and "script" in train:
            return [self._field(data, f"train.{option.name}", "Script", option) for option in describe(Script)]
        schema: Any = self._task_schema()
        if schema is not None:
            found += [self._field(data, f"task.{option.name}", "Task", option) for option in describe(schema)]
        return found

    def _task_schema(self) -> type[Any] | None:
        return task_schema(self.task) if self.task in BUILT_IN else self._schemas.get(self.task)

    def _node_fields(self, data: Any) -> list[Field]:
        options = {option.name: option for option in (*describe(NodeOptions), ENV)}
        saved = self.nodes(self._source.data)
        found = []
        for index, node in enumerate(self.nodes(data)):
            before = saved[index] if index < len(saved) else {}
            for name, option in options.items():
                value = node.get(name)
                found.append(
                    Field(
                        key=f"cluster.nodes[{index}].{name}",
                        group=f"Node {index}",
                        option=option,
                        value=value,
                        written=value is not None,
                        changed=value != before.get(name),
                    )
                )
        return found

    def nodes(self, data: Any = None) -> list[dict[str, Any]]:
        """Return the nodes as they are written; one that is this machine where there are none."""
        cluster = (self.data if data is None else data).get("cluster")
        nodes = cluster.get("nodes") if isinstance(cluster, dict) else None
        if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
            return [{}]
        return [dict(node) for node in nodes]

    # Changes

    def set(self, key: str, text: str) -> None:
        """Set a field to typed text, unchecked; empty text resets it to the default."""
        self._edit(key, lambda: self._set(key, text))

    def undo(self) -> str | None:
        """Undo the last edit since the recipe was opened or saved; return its key, None where there is none."""
        if not self._undo:
            return None
        key, self.changes, text = self._undo.pop()
        if text != self.text:
            self.text, self._source = text, parse(text, name=self.name)
        return key

    def _edit(self, key: str, change: Callable[[], R]) -> R:
        """Make a change that can be undone."""
        before = dict(self.changes), self.text
        result = change()
        if (self.changes, self.text) != before:
            self._undo.append((key, *before))
        return result

    def _set(self, key: str, text: str) -> None:
        if not text:
            self._reset(key)
            self._reset(key)
            return
        node = NODE_KEY.fullmatch(key)
        if node is None:
            if text == self._saved_text(key):
                self.changes.pop(key, None)
            else:
                self.changes[key] = _env(text) if key == "cluster.env" else text
            return
        nodes = self.nodes()
        entry = nodes[int(node[1])]
        if node[2] in RANK_KEYS:
            for other in RANK_KEYS:
                entry.pop(other, None)
        entry.pop(node[2], None)
        entry[node[2]] = _node_value(node[2], text)
        self._put_nodes(nodes)

    def _saved_text(self, key: str) -> str | None:
        """Return the text of a value in the file; None where it is not written."""
        value: Any = self._source.data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return None if value is None else value_text(value)

    def _put_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Change the nodes; those of the file are no change."""
        if list(nodes) == self.nodes(self._source.data):
            self.changes.pop("cluster.nodes", None)
        else:
            self.changes["cluster.nodes"] = [dict(node) for node in nodes]

    def settings_with(self, key: str, text: str) -> list[str]:
        """Return ``settings`` as they would be after ``set(key, text)``, without making the change."""
        before = dict(self.changes)
        try:
            self._set(key, text)
            return self.settings
        finally:
            self.changes = before

    def reset(self, key: str) -> None:
        """Take back the change of a key; without one, remove the key from the recipe, which means the default."""
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
        elif self._source.format == "toml":
            self._remove(key.split("."))

    def _remove(self, path: Sequence[str]) -> None:
        import tomlkit  # only what writes recipes needs it

        document = tomlkit.parse(self.text)
        table: Any = document
        for part in path[:-1]:
            table = table.get(part, {})
        if path[-1] in table:
            del table[path[-1]]
            if path[0] == "slurm" and not table:
                del document["slurm"]  # even empty it would submit the run
            self.text = tomlkit.dumps(document)
            self._source = parse(self.text, name=self.name)

    def add_node(self) -> int:
        """Add a node like the last one; return its index."""
        nodes = self.nodes()
        last = {key: value for key, value in nodes[-1].items() if key != "host"}
        added = [*(node or ONE_RANK for node in nodes), last or ONE_RANK]
        self._edit(f"cluster.nodes[{len(nodes) - 1}].host", lambda: self._put_nodes(added))
        return len(nodes)

    def remove_node(self, index: int) -> bool:
        """Remove a node; return False for the only one, which stays."""
        nodes = self.nodes()
        if len(nodes) < 2:
            return False
        del nodes[index]
        if nodes == [ONE_RANK] and self.nodes(self._source.data) == [{}]:
            nodes = [{}]  # as it was before a second node made it say what it runs
        self._edit(f"cluster.nodes[{max(index - 1, 0)}].host", lambda: self._put_nodes(nodes))
        return True

    def set_gpus(self, index: int, gpus: Sequence[int]) -> None:
        """Set the GPUs of a node."""
        nodes = self.nodes()
        nodes[index] = {key: value for key, value in nodes[index].items() if key not in RANK_KEYS}
        nodes[index]["gpus"] = list(gpus)
        self.set_nodes(nodes)

    def set_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Replace all nodes."""
        self._edit("cluster.nodes[0].gpus", lambda: self._put_nodes(nodes))

    def mark_saved(self, text: str, *, name: str) -> None:
        """Continue from a saved text, without changes."""
        self.text, self.name = text, name
        self._source = parse(text, name=name)
        self.changes.clear()
        self._undo.clear()

    # What is wrong

    def problem(self, field: Field, text: str) -> str:
        """Return the error of a value for a field, checked on its own; empty when it is valid."""
        node = NODE_KEY.fullmatch(field.key)
        try:
            if node is not None and not text:
                return ""
            if field.option is ENV:
                values = _env(text)
                if isinstance(values, str):
                    return f"env is {text!r}, but must be NAME=VALUE, several with blanks between, quoted as in a shell"
                recipes.check_env(values, where=lambda *key: ".".join(key))
            elif field.name == "gpus" and node is not None:
                recipes.parse_gpus(_node_value("gpus", text), where=field.name)
            else:
                check(self._schema(field), {field.option.name: text}, where=lambda name: name)
        except RequestError as error:
            message = str(error)
            # A single field may leave out others that its schema requires.
            return "" if " is missing" in message and not message.startswith(f"{field.name} ") else message
        return ""

    def _schema(self, field: Field) -> type[Any]:
        table = field.key.partition(".")[0]
        if NODE_KEY.fullmatch(field.key):
            return NodeOptions
        if table == "cluster":
            return ClusterOptions
        if table == "slurm":
            return SlurmOptions
        if table == "report":
            return ReportOptions
        if table == "task":
            return self._task_schema() or Script
        if field.name in LAUNCH_OPTIONS:
            return Distributed
        if field.group == "Script":
            return Script
        return Training if table == "train" else _NameOption


@dataclass(frozen=True, kw_only=True)
class _NameOption:
    """Schema of the only option at the top level of a recipe."""

    name: str = ""


def message_key(message: str) -> str:
    """Return the first recipe key in a message; empty when there is none."""
    match = MESSAGE_KEY.search(message)
    return match[1] if match else ""


def strip_location(message: str) -> str:
    """Return a message without its ``FILE:LINE: key``, to show beside the field."""
    key = message_key(message)
    return message.partition(key)[2].strip() if key else message


def find_field(fields: Sequence[Field], key: str) -> Field | None:
    """Return the field of a key, or of the first key below it."""
    exact = next((field for field in fields if field.key == key), None)
    if exact is not None or not key:
        return exact
    below = (field for field in fields if field.key.startswith((f"{key}.", f"{key}[")))
    return next(below, None)


def _env(text: str) -> dict[str, str] | str:
    """Parse ``NAME=VALUE NAME="VALUE"`` as a shell does; return other text as it is."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:  # a quotation mark has no second one
        return text
    return {name: value for name, _, value in pairs} if all(equals for _, equals, _ in pairs) else text


def _node_value(name: str, text: str) -> Any:
    """Parse the text of a node's field: a number or a list where it looks like one."""
    text = text.strip()
    if name == "env":
        return _env(text)
    if name not in RANK_KEYS:
        return text
    number = whole_number(text)
    if number is not None:
        return number
    if name == "gpus" and ("," in text or text.startswith("[")):
        words = [word.strip(" \"'") for word in text.strip("[]").split(",")]
        ids = ((word, whole_number(word)) for word in words if word)
        return [word if index is None else index for word, index in ids]
    return text


def _inline_toml(value: Any) -> str:
    """Write a value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline_toml, value)) + "]"
    if isinstance(value, dict):
        items = (f"{_inline_toml(str(key))} = {_inline_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    return str(value)
