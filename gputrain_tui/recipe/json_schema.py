"""The JSON Schema of a recipe, for editors, made of the options that the loader checks.

It has their names, types and ranges, and of the rules between keys those of a task and a script, and of the number of
ranks of a node. Draft 7, which editors of TOML understand. ``tests/unit/test_json_schema.py`` compares it with the
loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gputrain_tui.recipe import model
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.recipe.values import COMPUTED_VARIABLES, UUID, VARIABLE_NAME
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.rendezvous_url import FILE_URL, TCP_URL
from trainer.contract.schema import MAX_INT_BITS, Option, describe

NO_KEYS = {"maxProperties": 0}


def recipe_schema(task: str = "") -> dict[str, Any]:
    """Return the schema; ``task`` is a user's own task whose options it has too."""
    tasks = {name: describe_task(name) for name in (*BUILT_IN, *([task] if task else ()))}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "recipe of gputrain",
        "type": "object",
        "properties": {
            "name": {
                "description": "name of its runs; default: the file's name without suffix",
                "type": "string",
                "maxLength": model.MAX_NAME_CHARS,
                "pattern": r"^(?=.*\S)[^\u0000-\u001f\u007f-\u00a0]+$",
            },
            "cluster": _cluster(),
            "slurm": _table(model.SlurmOptions),
            "train": _train(),
            "task": {"type": "object"},
            "report": _table(model.ReportOptions),
        },
        "additionalProperties": False,
        "required": ["train"],
        "allOf": [
            {"if": _train_has(_any_of(Script.__struct_fields__)), "then": {"properties": {"task": NO_KEYS}}},
            *(
                _of_task(name, _table_of(options, {option.name: _rule(option) for option in options}))
                for name, options in tasks.items()
            ),
        ],
    }


def _train_has(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": ["train"], "properties": {"train": rule}}


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    return {"anyOf": [{"required": [name]} for name in names]}


def _of_task(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the rule that ``[task]`` has the options of the task that ``[train]`` names."""
    needed = ["task"] if "required" in table else []
    condition = {"required": ["task"], "properties": {"task": {"const": name}}}
    return {"if": _train_has(condition), "then": {"required": needed, "properties": {"task": table}}}


def _train() -> dict[str, Any]:
    """Return the schema of ``[train]``: a task with the options of the loop, or a script without them."""
    tables = [_table(schema)["properties"] for schema in (Training, Distributed, Script)]
    known = {name: rule for table in tables for name, rule in table.items()}
    tasks = {"pattern": f"^(?:{'|'.join(BUILT_IN)})$|:"}
    loop = [option.name for option in describe(Training) if option.name != "task"]
    return {
        "type": "object",
        "properties": {option.name: known[option.name] for option in model.train_options()},
        "additionalProperties": False,
        "if": _any_of(Script.__struct_fields__),
        "then": {
            "required": ["script"],
            "properties": {"task": {"const": ""}, **dict.fromkeys(loop, False)},
            "not": {"required": ["local_rank_flag", "starts_ranks"], "properties": {"starts_ranks": {"const": True}}},
        },
        "else": {"required": ["task"], "properties": {"task": tasks}},
    }


def _cluster() -> dict[str, Any]:
    cluster, node = _table(model.ClusterOptions), _table(model.NodeOptions)
    places = {name: {"pattern": f"^(?:{pattern})$"} for name, (pattern, _) in model.PATTERNS.items()}
    init_method = {"pattern": f"^(?:auto|env://|{TCP_URL}|{FILE_URL})$"}
    env = {
        "description": "environment variables of the ranks",
        "type": "object",
        "propertyNames": {"pattern": f"^{VARIABLE_NAME}$", "not": {"enum": list(COMPUTED_VARIABLES)}},
        "additionalProperties": {"type": ["string", "number"]},
    }
    gpus = {
        "description": node["properties"]["gpus"]["description"],
        "anyOf": [
            {"enum": ["all", "free"]},
            {"type": "integer", "minimum": 1, "maximum": model.MAX_RANKS_PER_NODE},
            {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{UUID}$"}]},
            },
        ],
    }
    for table in (cluster, node):
        for name, rule in table["properties"].items():
            rule |= places.get(name, {})
        table["properties"]["env"] = env
    cluster["properties"]["init_method"] |= init_method
    spare = cluster["properties"]["spare"]["anyOf"]
    spare[1]["items"] |= places["host"]
    spare[0] = {"type": "string", "pattern": f"^(?:{model.PATTERNS['host'][0]})?$"}  # an empty text is an empty list
    node["properties"]["gpus"] = gpus
    node["oneOf"] = [{"required": [name]} for name in model.RANK_KEYS]
    cluster["properties"]["nodes"] = {"type": "array", "minItems": 1, "items": node}
    assert set(cluster["properties"]) == set(model.CLUSTER_KEYS)
    return cluster


def _table(schema: type[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([schema], ref_template="{name}")
    return _table_of(describe(schema), components[schema.__name__]["properties"])


def _table_of(options: Sequence[Option], made: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a table with options; ``made`` as of ``_value``, by option."""
    required = [option.name for option in options if option.required]
    return {
        "type": "object",
        "properties": {option.name: _value(option, made[option.name]) for option in options},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _rule(option: Option) -> dict[str, Any]:
    types = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}
    kind = option.item_kind or "str" if option.kind == "list" else option.kind
    one: dict[str, Any] = {"enum": list(option.choices)} if option.choices else {"type": types[kind]}
    if option.minimum is not None:
        one["exclusiveMinimum" if option.exclusive_minimum else "minimum"] = option.minimum
    if option.maximum is not None:
        one["exclusiveMaximum" if option.exclusive_maximum else "maximum"] = option.maximum
    if option.kind != "list":
        return one
    lengths = {"minItems": option.min_items or None, "maxItems": option.max_items}
    return {"type": "array", "items": one, **{name: value for name, value in lengths.items() if value is not None}}


def _value(option: Option, made: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an option's value.

    ``made`` is what msgspec makes of its type, which lacks what the loader takes besides: other spellings of a choice,
    one item in place of a list, a number in place of a text.
    """
    # TOML has no null: an option that may be None is left out.
    words = {"enum": list(option.words)}  # added below
    rule = next((part for part in made.get("anyOf", ()) if {"type": "null"} in made["anyOf"] and part != words), made)
    rule = {key: value for key, value in rule.items() if key not in ("description", "default")}
    one = rule["items"] if option.kind == "list" else rule
    if one.get("type") == "integer":
        largest = 2**MAX_INT_BITS - 1
        one |= {"minimum": one.get("minimum", -largest), "maximum": one.get("maximum", largest)}
    if option.spellings:
        rule["enum"] = [*rule["enum"], *(name for name in option.spellings if name not in rule["enum"])]
    if option.or_kind:
        other = {"type": {"int": "integer", "bool": "boolean", "list": "array"}[option.or_kind]}
        rule = {"anyOf": [rule, other | ({"items": {"type": "number"}} if option.or_kind == "list" else {})]}
    if option.kind == "list" and option.min_items <= 1:
        rule = {"anyOf": [one, rule, *({"const": word} for word in option.words)]}
    described = {"description": option.help} if option.help else {}
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    return described | rule | ({} if default is None else {"default": default})
