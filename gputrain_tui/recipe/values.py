"""Parses, checks and writes single values of a recipe, for files, hostfiles and forms."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

from gputrain_tui.recipe.model import MAX_RANKS_PER_NODE, RANK_KEYS, Gpus
from trainer.contract.errors import RequestError, nearest, quoted

COMPUTED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "set gpus of a node in [[cluster.nodes]]",
    "CUDA_DEVICE_ORDER": "gputrain numbers GPUs as nvidia-smi does",
    "MASTER_ADDR": "set cluster.init_method",
    "MASTER_PORT": "set cluster.port",
}
"""Environment variables that the plan computes → the recipe's key to set instead."""
VARIABLE_NAME = "[A-Za-z_][A-Za-z0-9_]*"

UUID_PREFIXES = ("GPU-", "MIG-")
"""Beginnings of the driver's UUIDs: of a whole GPU and of a MIG instance."""
UUID = r"(?:GPU|MIG)-[0-9A-Za-z/_-]*"
"""A UUID or its beginning, including older drivers' form of a MIG instance: ``MIG-GPU-…/1/0``."""


def check_env(values: Any, *, where: Callable[..., str]) -> dict[str, str]:
    """Check a table ``env``; ``where`` returns the location of a key path for messages."""
    if not isinstance(values, dict):
        example = '{ NCCL_DEBUG = "INFO" }'
        raise RequestError(f"{where('env')} is {quoted(values)}, but must be a table, such as {example}")
    for name, value in values.items():
        location = where("env", name)
        if not re.fullmatch(VARIABLE_NAME, name):
            raise RequestError(f"{location} is not a valid name of an environment variable: use letters, digits and _")
        if name in COMPUTED_VARIABLES:
            raise RequestError(f"{location} is computed; {COMPUTED_VARIABLES[name]}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RequestError(f"{location} is {quoted(value)}, but must be text or a number")
    return {name: str(value) for name, value in values.items()}


def parse_gpus(value: Any, *, where: str, is_text: bool = True) -> Gpus:
    """Parse ``gpus``: ``4``, ``[0, 2]``, ``"all"`` or ``"free"``; with ``is_text`` also as text, as in a form."""
    if isinstance(value, str):
        text = value.strip() if is_text else value
        if text in ("all", "free"):
            return "all" if text == "all" else "free"
        if is_text and (count := whole_number(text)) is not None:
            value = count
        elif is_text and ("," in text or text.startswith(("[", *UUID_PREFIXES))):
            value = _parse_devices(text)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        if value > MAX_RANKS_PER_NODE:
            raise RequestError(f"{where} is {value}, but one machine has at most {MAX_RANKS_PER_NODE} ranks")
        return value
    if isinstance(value, list) and value and all(_is_device(item) for item in value):
        return tuple(value)
    guess = nearest(value, ("all", "free")) if isinstance(value, str) else ""
    if value == 0:
        guess = "; for a node without GPUs set cpu_ranks"
    raise RequestError(
        f'{where} is {quoted(value)}, but must be a count >= 1, a list of device ids, "all" or "free"{guess}'
    )


def _parse_devices(text: str) -> list[int | str]:
    """Parse a list of indices and UUIDs, with or without brackets and quotes."""
    parts = (word.strip(" \"'") for word in text.strip("[]").split(","))
    ids = ((word, whole_number(word)) for word in parts if word)
    return [word if index is None else index for word, index in ids]


def whole_number(text: str) -> int | None:
    """Parse a count, an index or a port of at most nine digits; None for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _is_device(item: Any) -> bool:
    if isinstance(item, str):
        return re.fullmatch(UUID, item) is not None
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def parse_env(text: str) -> dict[str, str] | str:
    """Parse ``NAME=VALUE NAME="VALUE"`` by a shell's rules; return any other text unchanged."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:  # an unclosed quote
        return text
    return {name: value for name, _, value in pairs} if all(equals for _, equals, _ in pairs) else text


def parse_node_value(name: str, text: str) -> Any:
    """Parse the text of a node's field as ``env``, a number of ranks or a list of GPUs; else return the text."""
    text = text.strip()
    if name == "env":
        return parse_env(text)
    if name not in RANK_KEYS:
        return text
    number = whole_number(text)
    if number is not None:
        return number
    if name == "gpus" and ("," in text or text.startswith("[")):
        return _parse_devices(text)
    return text


def value_text(value: Any) -> str:
    """Return a value as text that ``--set`` and a form parse back; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return " ".join(f"{name}={shlex.quote(str(item))}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if any(isinstance(item, str) and set(item) & set(', []"') for item in value):
            return json.dumps(list(value), ensure_ascii=False)
        return ", ".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def inline_toml(value: Any) -> str:
    """Write a value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses DEL, which JSON allows
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline_toml, value)) + "]"
    if isinstance(value, dict):
        items = (f"{inline_toml(str(key))} = {inline_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    return str(value)
