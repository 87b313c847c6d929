"""The fields of a recipe's form and their messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gputrain_tui.recipe.values import value_text
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.schema import Option

NODE_KEY = re.compile(r"cluster\.nodes\[(\d+)\]\.(\w+)")
MESSAGE_KEY = re.compile(r"(?:^|[: ])((?:name|cluster|slurm|train|task|report)(?:\.\w+|\[\d+\])*)(?=[\s:]|$)")
ENV = Option(name="env", kind="str", help="environment variables of the ranks, such as NCCL_DEBUG=INFO")
"""The table ``env`` of the cluster or of a node, as one line."""
PATH_NAMES = ("resume", "shares_from", "finetune_from", "eval_only", "script", "task", "workdir", "python")
PATH_ENDINGS = ("_path", "_dir", "_file", "_folder")


@dataclass(frozen=True)
class FieldMessage:
    """A message that a field shows instead of its help."""

    text: str
    status: Literal["note", "warning", "error"] = "error"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of a recipe in a form."""

    key: str
    """In the syntax of ``--set``: ``train.lr``, ``cluster.nodes[0].gpus``."""
    group: str
    option: Option
    value: Any
    """The recipe's value; the default if the key is absent."""
    written: bool
    changed: bool

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
        """Whether its text may name a file: by the option's name, or since its value may differ between ranks."""
        named = self.name in PATH_NAMES or self.name.endswith(PATH_ENDINGS)
        return self.option.kind == "str" and (self.option.per_rank or named)

    @property
    def values(self) -> tuple[str, ...]:
        """The choices; empty if any value of the kind is allowed."""
        if self.key == "train.task":
            return tuple(BUILT_IN)
        if self.option.kind == "bool":
            return ("true", "false")
        return tuple(map(str, self.option.choices))


def find_field(fields: Sequence[Field], key: str) -> Field | None:
    """Return the field of a key, or of the first key below it."""
    exact = next((field for field in fields if field.key == key), None)
    if exact is not None or not key:
        return exact
    below = (field for field in fields if field.key.startswith((f"{key}.", f"{key}[")))
    return next(below, None)


def message_key(message: str) -> str:
    """Return the first recipe key in a message; empty when there is none."""
    match = MESSAGE_KEY.search(message)
    return match[1] if match else ""


def strip_location(message: str) -> str:
    """Return a message without its ``FILE:LINE: key``, to show beside the field."""
    key = message_key(message)
    return message.partition(key)[2].strip() if key else message
