"""A recipe as TOML that a person can go on editing: comments, order and spelling stay where they were."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import tomlkit
from tomlkit import items

from gputrain_tui.recipe.model import CLUSTER_KEYS, LAUNCH_OPTIONS, Recipe
from trainer.contract.options import Distributed, Training


def dump_toml(recipe: Recipe) -> str:
    """Return the recipe as TOML that loads to the same recipe, with the comments of its text where it was TOML."""
    wanted = contents(recipe)
    if recipe.origin.format == "json":
        return tomlkit.dumps(_document(wanted))
    written = tomllib.loads(recipe.text)
    spelled = _spelled(wanted, written, recipe)
    if spelled == written:
        return recipe.text
    document = tomlkit.parse(recipe.text)
    _update(document, spelled)
    return tomlkit.dumps(document)


def contents(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe says beyond the defaults, as TOML values."""
    train = _differing(recipe.train, Training)
    launch = _differing(recipe.launch, Distributed)
    cluster = {key: getattr(recipe.cluster, key) for key in CLUSTER_KEYS if key != "nodes"}
    default = type(recipe.cluster)()
    cluster = {key: value for key, value in cluster.items() if value != getattr(default, key)}
    if recipe.cluster.nodes != default.nodes:
        cluster["nodes"] = [
            {key: value for key, value in msgspec.to_builtins(node).items() if value is not None}
            for node in recipe.cluster.nodes
        ]
    script = {} if recipe.script is None else msgspec.to_builtins(recipe.script)
    task = {key: value for key, value in recipe.task_options.items() if value is not None}
    tables = {"cluster": cluster, "train": train | launch | script, "task": task}
    return {"name": recipe.name, **{key: table for key, table in tables.items() if table}}


def _differing(options: Any, schema: type[Any]) -> dict[str, Any]:
    default = schema()
    names = [name for name in schema.__struct_fields__ if schema is Training or name in LAUNCH_OPTIONS]
    found = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {name: _one(value) for name, value in plain.items() if value is not None}


def _one(value: Any) -> Any:
    """A list of one is written as its item, which means the same."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _spelled(wanted: Mapping[str, Any], written: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the wanted values as they are written already, where that means the same."""
    result: dict[str, Any] = {}
    if "name" in written or recipe.name != recipe.origin.default_name:
        result["name"] = wanted["name"]
    for table in ("cluster", "train", "task"):
        before = written.get(table, {})
        after = dict(wanted.get(table, {}))
        for key, value in before.items():
            now = _now(recipe, table, key)
            if _same(value, now):
                after[key] = value
            elif now is not None and key not in after:
                after[key] = _one(now) if table == "train" else now
        if table in written or after:
            result[table] = after
    return result


def _now(recipe: Recipe, table: str, key: str) -> Any:
    """Return what a key of the text means in the recipe as it is now, defaults included."""
    if table == "task":
        return recipe.task_options.get(key)
    if table == "cluster":
        value = getattr(recipe.cluster, key)
    elif key in ("script", "args"):
        value = getattr(recipe.script, key, None)
    else:
        value = getattr(recipe.launch if key in LAUNCH_OPTIONS else recipe.train, key)
    if key == "nodes":
        return [{k: v for k, v in msgspec.to_builtins(node).items() if v is not None} for node in value]
    return msgspec.to_builtins(value)


def _same(written: Any, now: Any) -> bool:
    """Whether a written value means ``now``: a scalar stands for a list of one, ``"32,8"`` for its items."""
    if written == now:
        return type(written) is not bool or written is now
    if isinstance(now, list | tuple) and not isinstance(written, list):
        return len(now) == 1 and _same(written, now[0])
    if isinstance(now, list | tuple) and isinstance(written, list):
        return len(now) == len(written) and all(_same(one, other) for one, other in zip(written, now, strict=True))
    return False


def _document(values: Mapping[str, Any]) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    _update(document, values)
    return document


def _update(container: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Change a container of tomlkit so that it holds exactly ``values``, touching only what differs."""
    for key in [key for key in container if key not in values]:
        del container[key]
    for key, value in values.items():
        before = container.get(key)
        if isinstance(value, dict):
            if not isinstance(before, MutableMapping):
                before = tomlkit.table()
                container[key] = before
            _update(container[key], value)
        elif _is_tables(value):
            if isinstance(before, list) and len(before) == len(value) and _is_tables(before):
                for table, new in zip(before, value, strict=True):
                    _update(table, new)
            else:
                container[key] = _tables(value)
        elif before is None or tomlkit.item(value).unwrap() != tomlkit.item(before).unwrap():
            container[key] = value


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _tables(rows: list[dict[str, Any]]) -> items.AoT:
    tables = tomlkit.aot()
    for row in rows:
        table = tomlkit.table()
        _update(table, row)
        tables.append(table)
    return tables
