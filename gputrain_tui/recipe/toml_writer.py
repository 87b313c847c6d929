"""Writes a recipe as TOML and preserves the comments, order and spelling of its text."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import tomlkit
from tomlkit import items

from gputrain_tui.recipe.model import CLUSTER_KEYS, LAUNCH_OPTIONS, Recipe
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import describe


def dump_toml(recipe: Recipe) -> str:
    """Return TOML that loads to the same recipe, with the comments of its text if the text is TOML."""
    wanted = _explicit_values(recipe)
    if recipe.origin.format == "json":
        return tomlkit.dumps(_document(wanted))
    written = tomllib.loads(recipe.text)
    spelled = _with_written_spelling(wanted, written, recipe)
    if spelled == written:
        return recipe.text
    document = tomlkit.parse(recipe.text)
    _update(document, spelled)
    return tomlkit.dumps(document)


def _explicit_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recipe that differ from the defaults."""
    train = _non_defaults(recipe.train, Training)
    launch = _non_defaults(recipe.launch, Distributed)
    cluster = {key: getattr(recipe.cluster, key) for key in CLUSTER_KEYS if key != "nodes"}
    default = type(recipe.cluster)()
    cluster = {key: value for key, value in cluster.items() if value != getattr(default, key)}
    if recipe.cluster.nodes != default.nodes:
        cluster["nodes"] = _node_tables(recipe)
    script = {} if recipe.script is None else _script_values(recipe.script)
    task = {key: value for key, value in recipe.task_options.items() if value is not None}
    slurm = {} if recipe.slurm is None else _set_values(recipe.slurm)
    report = _set_values(recipe.report)
    tables = {"cluster": cluster, "slurm": slurm, "train": train | launch | script, "task": task, "report": report}
    return {"name": recipe.name, **{key: table for key, table in tables.items() if table}}


def _script_values(script: Script) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(script)
    defaults = {option.name: option.default for option in describe(Script)}
    return {name: value for name, value in values.items() if name in ("script", "args") or value != defaults[name]}


def _node_tables(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in msgspec.to_builtins(node).items() if value not in (None, {})}
        for node in recipe.cluster.nodes
    ]


def _set_values(options: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(options).items() if value}


def _non_defaults(options: Any, schema: type[Any]) -> dict[str, Any]:
    default = schema()
    names = [name for name in schema.__struct_fields__ if schema is Training or name in LAUNCH_OPTIONS]
    found = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {name: _unwrap_single(value) for name, value in plain.items() if value is not None}


def _unwrap_single(value: Any) -> Any:
    """Return the item of a list of one, which a recipe may have in place of the list; any other value as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _with_written_spelling(wanted: Mapping[str, Any], written: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the wanted values, each as the text writes it if both mean the same."""
    result: dict[str, Any] = {}
    if "name" in written or recipe.name != recipe.origin.default_name:
        result["name"] = wanted["name"]
    for table in ("cluster", "slurm", "train", "task", "report"):
        before = written.get(table, {})
        after = dict(wanted.get(table, {}))
        for key, value in before.items():
            now = _current_value(recipe, table, key)
            if _means_same(value, now):
                after[key] = value
            elif now is not None and key not in after:
                after[key] = _unwrap_single(now) if table == "train" else now
        if table in written or after:
            result[table] = after
    return result


def _current_value(recipe: Recipe, table: str, key: str) -> Any:
    """Return the recipe's value of a key, defaults included."""
    if table == "task":
        return recipe.task_options.get(key)
    if (table, key) == ("cluster", "nodes"):
        return _node_tables(recipe)
    if table in ("cluster", "slurm", "report"):
        value = getattr(getattr(recipe, table), key)
    elif key in Script.__struct_fields__:
        value = getattr(recipe.script, key, None)
    else:
        value = getattr(recipe.launch if key in LAUNCH_OPTIONS else recipe.train, key)
    return msgspec.to_builtins(value)


def _means_same(written: Any, now: Any) -> bool:
    """Whether a written value means ``now``; a scalar stands for a list of one."""
    if written == now:
        return type(written) is not bool or written is now
    if isinstance(written, bool | int) and isinstance(now, str):
        return str(written).lower() == now
    if isinstance(now, list | tuple) and not isinstance(written, list):
        return len(now) == 1 and _means_same(written, now[0])
    if isinstance(now, list | tuple) and isinstance(written, list):
        return len(now) == len(written) and all(
            _means_same(one, other) for one, other in zip(written, now, strict=True)
        )
    return False


def _document(values: Mapping[str, Any]) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    _update(document, values)
    return document


def _update(container: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Change a tomlkit container to hold exactly ``values``; equal values keep their text."""
    for key in [key for key in container if key not in values]:
        del container[key]
    for key, value in values.items():
        before = container.get(key)
        if isinstance(value, dict):
            if not isinstance(before, MutableMapping):
                before = tomlkit.table()
                container[key] = before
            _update(container[key], value)
        elif _is_array_of_tables(value):
            if isinstance(before, list) and len(before) == len(value) and _is_array_of_tables(before):
                for table, new in zip(before, value, strict=True):
                    _update(table, new)
            else:
                container[key] = _array_of_tables(value)
        elif before is None or tomlkit.item(value).unwrap() != tomlkit.item(before).unwrap():
            container[key] = value


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _array_of_tables(rows: list[dict[str, Any]]) -> items.AoT:
    tables = tomlkit.aot()
    for row in rows:
        table = tomlkit.table()
        _update(table, row)
        tables.append(table)
    return tables
