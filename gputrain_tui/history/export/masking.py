"""Finds secrets in what a run was asked to do, and masks them there and wherever else they were printed.

In a table ``env`` and in assignments of a shell, names such as ``HF_TOKEN`` are secrets; of options, whose names are
words such as ``max_tokens``, only those that end with such a word and hold text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
MASK = "********"
QUOTES = "\"'"
MIN_VALUE_CHARS = 8
"""Shorter values are not looked for in logs: ``false`` of TOKENIZERS_PARALLELISM stands everywhere."""

_ASSIGNMENT = re.compile(
    rf"\b(\w*(?:{'|'.join(SECRET_WORDS)})\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|]+)", re.IGNORECASE | re.ASCII
)
_OPTION_END = re.compile(r"(?:TOKEN|KEYS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable is a secret, by its name."""
    return any(word in name.upper() for word in SECRET_WORDS)


def is_secret_option(name: str) -> bool:
    """Whether the text of an option is a secret, by the end of its name: ``api_key``, and not ``tokenizer``."""
    return _OPTION_END.search(name) is not None


class SecretMask:
    """Masks secrets in parsed files, and then their values in bytes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Begin with the secrets of an environment, which a program may have printed."""
        self.masked: set[str] = set()
        """Names of the secrets that were masked."""
        self._names: dict[bytes, str] = {}
        """Of values that are masked wherever they stand."""
        self._pattern: re.Pattern[bytes] | None = None
        for name, value in environment.items():
            if is_secret_variable(name):
                self._learn(name, value)

    def mask_values(self, container: Any, *, table: str = "") -> None:
        """Mask the secrets of a parsed file in place; ``table``: the key that it stands under."""
        pairs: Iterable[tuple[Any, Any]] = (
            list(container.items()) if isinstance(container, dict) else list(enumerate(container))
        )
        flag = ""
        for key, value in pairs:
            if isinstance(value, dict | list):
                self.mask_values(value, table=str(key) if isinstance(key, str) else table)
            elif (isinstance(value, str) and value) or (table == "env" and not isinstance(value, bool)):
                text = str(value)
                shown = self._masked(key, text, flag, in_env=table == "env")
                if shown != text:
                    container[key] = shown
                flag = text if isinstance(key, int) and text.startswith("--") else ""

    def _masked(self, key: str | int, value: str, flag: str, *, in_env: bool) -> str:
        if isinstance(key, str):
            if is_secret_variable(key) if in_env else is_secret_option(key):
                return self._hide(key, value)
        elif flag and is_secret_option(flag) and not value.startswith("--"):  # the word after a flag of a command
            return self._hide(flag, value)
        elif value.startswith("--") and "=" in value and is_secret_option(value.partition("=")[0]):
            name, _, given = value.partition("=")
            return f"{name}={self._hide(name, given)}"
        return _ASSIGNMENT.sub(lambda found: f"{found[1]}={self._hide(found[1], found[2].strip(QUOTES))}", value)

    def _hide(self, name: str, value: str) -> str:
        self.masked.add(name.lstrip("-"))
        self._learn(name.lstrip("-"), value)
        return MASK

    def _learn(self, name: str, value: str) -> None:
        if len(value) >= MIN_VALUE_CHARS:
            raw = value.encode("utf-8", "surrogateescape")
            for form in (raw, json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")):
                self._names.setdefault(form, name)
            self._pattern = None

    def mask_bytes(self, data: bytes) -> bytes:
        """Return bytes of the same length in which every known secret is stars."""
        if not self._names:
            return data
        if self._pattern is None:
            values = sorted(self._names, key=len, reverse=True)
            self._pattern = re.compile(b"|".join(map(re.escape, values)))
        return self._pattern.sub(self._stars, data)

    def _stars(self, found: re.Match[bytes]) -> bytes:
        self.masked.add(self._names[found[0]])
        return b"*" * len(found[0])

    @property
    def longest_bytes(self) -> int:
        """Length of the longest value that ``mask_bytes`` looks for."""
        return max(map(len, self._names), default=1)
