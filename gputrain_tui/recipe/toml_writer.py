"""Writes a recipe as TOML and preserves the comments, order and spelling of its text."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import tomlkit
from tomlkit import items

from gputrain_tui.recipe.model import LAUNCH_OPTIONS, Cluster, Recipe, ReportOptions, SlurmOptions
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import describe

TABLES = ("cluster", "slurm", "train", "task", "report")
Body = list[tuple[items.Key | None, items.Item]]
"""Entries of a table in order; comments and blank lines have no key."""


def dump_toml(recipe: Recipe) -> str:
    """Return TOML that loads to the same recipe, with the comments of its text if the text is TOML."""
    if recipe.origin.format == "json":
        return tomlkit.dumps(_document({"name": recipe.name, **_spelled(recipe, {})}))
    written = tomllib.loads(recipe.origin.text)
    spelled = _spelled(recipe, written)
    if "name" in written or recipe.name != recipe.origin.default_name:
        spelled = {"name": recipe.name, **spelled}
    if spelled == written:
        return recipe.origin.text
    document = tomlkit.parse(recipe.origin.text if recipe.origin.text.endswith("\n") else f"{recipe.origin.text}\n")
    for table in TABLES:
        if table in document and _last_body(document, table) is None and spelled.get(table) != written[table]:
            del document[table]  # tomlkit adds no table to an inline one or to dotted keys: it gets a header
    ends = {table: _take_end(body) for table in TABLES if (body := _last_body(document, table)) is not None}
    new = {table: spelled.pop(table) for table in TABLES if table in spelled and table not in document}
    _update(document, spelled)
    last = next((table for table in reversed(list(document)) if table in ends), None)
    rest = ""
    for table, end in ends.items():
        body = _last_body(document, table)
        if body is None or table == last:  # new tables go before what stands below the last one
            rest += "".join(item.as_string() for _, item in end)
        else:
            body += end
    return tomlkit.dumps(document) + "".join(_table_text(table, values) for table, values in new.items()) + rest


def _last_body(document: tomlkit.TOMLDocument, table: str) -> Body | None:
    """Return the body of the last table with a header at or below ``table``; None if there is none."""
    body: Body | None = None
    entries = [entry for entry in document.body if entry[0] is not None and entry[0].key == table]
    while entries:
        key, item = entries[-1]
        if key is None or key.is_dotted() or not isinstance(item, items.Table | items.AoT):
            break
        body = (item.body[-1] if isinstance(item, items.AoT) else item).value.body
        entries = [entry for entry in body if entry[0] is not None]
    return body


def _take_end(body: Body) -> Body:
    """Remove and return the end of a table, from the first blank line below its keys on.

    New keys go before it, as what stands there is about the next table.
    """
    last = max((index for index, (key, _) in enumerate(body) if key is not None), default=-1)
    blank = [index for index, (_, item) in enumerate(body) if index > last and isinstance(item, items.Whitespace)]
    cut = blank[0] if blank else len(body)
    end = body[cut:]
    del body[cut:]
    return end


def _table_text(table: str, values: Any) -> str:
    return "\n" + tomlkit.dumps(_document({table: values})).strip("\n") + "\n"


def _spelled(recipe: Recipe, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults or are written, each as the text writes it if that means it."""
    defaults = _defaults()
    result: dict[str, Any] = {}
    for table, values in _values(recipe).items():
        before = written.get(table, {})
        for key, value in values.items():
            if key in before and _means_same(before[key], value):
                values[key] = before[key]
            elif key not in before and value == defaults[table].get(key):
                values[key] = None
            elif table == "train" and isinstance(value, list | tuple) and len(value) == 1:
                values[key] = value[0]
        if table in written or any(value is not None for value in values.values()):
            result[table] = {key: value for key, value in values.items() if value is not None}
    return result


def _values(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return all values of a recipe by table, defaults included."""
    nodes = [msgspec.to_builtins(node) for node in recipe.cluster.nodes]
    nodes = [{key: value for key, value in node.items() if value not in (None, {})} for node in nodes]
    return {
        "cluster": msgspec.to_builtins(recipe.cluster) | {"nodes": nodes},
        "slurm": {} if recipe.slurm is None else msgspec.to_builtins(recipe.slurm),
        "train": _builtins(recipe.train, recipe.launch, recipe.script),
        "task": dict(recipe.task_options),
        "report": msgspec.to_builtins(recipe.report),
    }


def _builtins(train: Training, launch: Distributed, script: Script | None) -> dict[str, Any]:
    plain = msgspec.to_builtins(launch)
    own = {} if script is None else msgspec.to_builtins(script)
    return {**msgspec.to_builtins(train), **{name: plain[name] for name in LAUNCH_OPTIONS}, **own}


def _defaults() -> dict[str, dict[str, Any]]:
    cluster, slurm, report = map(msgspec.to_builtins, (Cluster(), SlurmOptions(), ReportOptions()))
    train = _builtins(Training(), Distributed(), None)
    script = {option.name: option.default for option in describe(Script) if option.name != "args"}
    return {"cluster": cluster | {"nodes": [{}]}, "slurm": slurm, "train": train | script, "task": {}, "report": report}


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
