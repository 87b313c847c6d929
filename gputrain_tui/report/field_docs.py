"""The text below each field of a class, read from its source: for JSON Schemas and tables."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import chain
from typing import Any, get_args, get_type_hints

import msgspec


def field_docs(kind: type) -> dict[str, str]:
    """Return the text below each field of a class, in one line; empty for a field without one.

    Raises:
        OSError: the source is not there.
    """
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    fields: dict[str, str] = {}
    last = ""
    for part in body.body:
        if isinstance(part, ast.AnnAssign | ast.Assign):
            target = part.target if isinstance(part, ast.AnnAssign) else part.targets[0]
            assert isinstance(target, ast.Name)
            last = target.id
            fields[last] = ""
        elif last and isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
            fields[last] = prose(str(part.value.value))
    return fields


def prose(text: str) -> str:
    """Return a docstring as one line, with single backticks."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(inspect.cleandoc(text).split()))


def described_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a struct, in which every documented field has its description."""
    schema = msgspec.json.schema(kind)
    for each in structs_of(kind):
        definition = schema["$defs"][each.__name__]
        definition["description"] = prose(each.__doc__ or "")
        try:
            docs = [field_docs(owner) for owner in each.__mro__ if "__annotations__" in vars(owner)]
        except OSError:  # a distribution without sources: the schema is the same but for these
            continue
        for name, text in chain.from_iterable(of_class.items() for of_class in docs):
            if text:
                definition["properties"][name] = {"description": text} | definition["properties"][name]
    return schema


def structs_of(kind: type[msgspec.Struct]) -> list[type]:
    """Return a struct and all structs and dataclasses in its fields, each once."""
    found: list[type] = [kind]
    for each in found:
        for hint in get_type_hints(each).values():
            found += [inner for inner in dict.fromkeys(_structs_in(hint)) if inner not in found]
    return found


def _structs_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or is_dataclass(hint)):
        yield hint
    for argument in get_args(hint):
        yield from _structs_in(argument)
