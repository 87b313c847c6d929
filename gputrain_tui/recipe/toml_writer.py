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

TABLES = ("cluster", "slurm", "train", "task", "report")
"""Tables of a recipe, in their order."""
HEAD = "head"
"""Place of a new table below the keys without a table."""
PLACE = "place of new tables: "
"""Beginning of a comment that stands for a place while a recipe is written."""
Body = list[tuple[items.Key | None, items.Item]]
"""Entries of a table in order; comments and blank lines have no key."""


def dump_toml(recipe: Recipe) -> str:
    """Return TOML that loads to the same recipe, with the comments of its text if the text is TOML."""
    wanted = _explicit_values(recipe)
    if recipe.origin.format == "json":
        return tomlkit.dumps(_document(wanted))
    written = tomllib.loads(recipe.text)
    spelled = _with_written_spelling(wanted, written, recipe)
    if spelled == written:
        return recipe.text
    document = tomlkit.parse(recipe.text if recipe.text.endswith("\n") else f"{recipe.text}\n")
    for table in TABLES:
        if table in document and _last_body(document, table) is None and spelled.get(table) != written[table]:
            del document[table]  # tomlkit adds no table to an inline one or to dotted keys: it gets a header
    ends = {table: _take_end(body) for table in TABLES if (body := _last_body(document, table)) is not None}
    new = {table: spelled.pop(table) for table in TABLES if table in spelled and table not in document}
    _update(document, spelled)
    return _with_tables(document, new, ends)


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


def _take_end(body: Body) -> str:
    """Remove and return the end of a table's text, from the first blank line below its keys on.

    New keys go before it, as what stands there is about the next table.
    """
    last = max((index for index, (key, _) in enumerate(body) if key is not None), default=-1)
    blank = [index for index, (_, item) in enumerate(body) if index > last and isinstance(item, items.Whitespace)]
    cut = blank[0] if blank else len(body)
    end = "".join(item.as_string() for _, item in body[cut:])
    del body[cut:]
    return end


def _with_tables(document: tomlkit.TOMLDocument, new: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    """Return a document's text with its tables' ends, and new tables, each after its predecessor in ``TABLES``."""
    head = [
        index
        for index, (key, item) in enumerate(document.body)
        if key is not None and (key.is_dotted() or not isinstance(item, items.Table | items.AoT))
    ]
    bodies = {table: body for table in TABLES if (body := _last_body(document, table)) is not None}
    if not bodies:
        return (
            tomlkit.dumps(document) + "".join(_table_text(table, new[table]) for table in new) + "".join(ends.values())
        )
    anchor = HEAD if head else next(reversed(bodies))
    tables = dict.fromkeys((HEAD, *TABLES), "")
    kept = dict(tables)
    for table in TABLES:
        anchor = table if table in bodies else anchor
        tables[anchor] += _table_text(table, new[table]) if table in new else ""
        kept[anchor] += ends.get(table, "")
    for table, body in bodies.items():
        body.append((None, tomlkit.comment(PLACE + table)))
    if head:
        document.body.insert(head[-1] + 1, (None, tomlkit.comment(PLACE + HEAD)))
    text = tomlkit.dumps(document)
    for place in tables:
        before, mark, after = text.partition(f"# {PLACE}{place}\n")
        if mark:
            gap = "\n" if tables[place] and not kept[place] and after.strip() and not after.startswith("\n") else ""
            text = before + tables[place] + kept[place] + gap + after
    return text


def _table_text(table: str, values: Any) -> str:
    return "\n" + tomlkit.dumps(_document({table: values})).strip("\n") + "\n"


def _explicit_values(recipe: Recipe) -> dict[str, Any]:
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
    for table in TABLES:
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
