"""Finds secrets in a run's recipe, plan and environment, and masks them there and in its logs and events.

A variable of a table ``env`` or of a shell assignment is secret if its name contains a word such as in ``HF_TOKEN``. An
option is secret only if its name ends with such a word and its value is text (``max_tokens`` is not). Within any text,
the userinfo of a URL, a header's credentials, the value of such a flag and tokens of well-known services are secrets
too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "WEBHOOK", "AUTHORIZATION")
"""Words that make a name secret wherever they occur in it."""
SECRET_PARTS = frozenset(("AUTH", "COOKIE", "DSN", "PASS", "PAT", "PWD", "SIGNATURE"))
"""Words that must stand between underscores, because harmless words contain them, such as ``PATH`` and ``COMPASS``."""
PLACES = frozenset(("PWD", "OLDPWD", "SSH_AUTH_SOCK"))
"""Variables that have such a part but are paths."""
MASK = "********"
QUOTES = "\"'"
MIN_VALUE_CHARS = 8
"""Minimum length of a value that is masked in logs: ``false`` of TOKENIZERS_PARALLELISM is in every log."""

_OPTION_END = re.compile(
    r"(?:TOKEN|KEYS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|WEBHOOK|AUTHORIZATION)$", re.IGNORECASE
)
_QUOTED = r"\"[^\"]*\"|'[^']*'"
_ASSIGNMENT = re.compile(rf"(?<![\w-])([\w-]+)=({_QUOTED}|[^\s;&|]+)", re.ASCII)
"""Assignment in a shell command, in the query of a URL or in a program's settings."""
_HEADER = re.compile(
    r"(?<![\w-])([\w-]+)[\"']?:\s*[\"']?(?:(?:Basic|Bearer|Token)\s+)?([^\s\"',;}]+)", re.ASCII | re.IGNORECASE
)
"""Header of a request, or key of JSON, with its value."""
_FLAG = re.compile(rf"(?<!\S)(-[\w-]+)\s+({_QUOTED}|[^\s;&|\"'-][^\s;&|\"']*)", re.ASCII)
_BEARER = re.compile(r"\bBearer\s+([\w.~+/=-]+)", re.ASCII | re.IGNORECASE)
_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]{0,30})://([^\s/\"']+)@", re.ASCII | re.IGNORECASE)
_WELL_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|sk-|AKIA|eyJ)[A-Za-z0-9_.-]{16,}"
)
"""Tokens of Hugging Face, GitHub, GitLab, Slack, OpenAI and others, Amazon; JSON web tokens."""


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable is a secret, by its name."""
    upper = name.upper().replace("-", "_")
    if upper in PLACES:
        return False
    return any(word in upper for word in SECRET_WORDS) or not SECRET_PARTS.isdisjoint(upper.split("_"))


def is_secret_option(name: str) -> bool:
    """Whether the text of an option is a secret, by the end of its name: ``api_key``, and not ``tokenizer``."""
    return _OPTION_END.search(name) is not None


def _is_user_with_password(flag: str, value: str) -> bool:
    """Whether the word after a flag is ``user:password``, as of curl."""
    return flag in ("-u", "--user") and ":" in value


class SecretMask:
    """Masks secrets in parsed files, and then their values in bytes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Begin with the secrets of an environment, which a program may have printed."""
        self.masked: set[str] = set()
        """Names of the secrets that were masked."""
        self._names: dict[bytes, str] = {}
        """Name of each secret by its value, which is masked everywhere."""
        self._pattern: re.Pattern[bytes] | None = None
        for name, value in environment.items():
            if is_secret_variable(name):
                self._learn(name, value)
            else:
                self.mask_text(value)
        self.masked.clear()  # the environment itself is not part of the archive

    def mask_values(self, container: Any, *, table: str = "") -> None:
        """Mask the secrets of a parsed file in place; ``table``: the key of ``container`` in the file."""
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
                flag = text if isinstance(key, int) and text.startswith("-") else ""

    def _masked(self, key: str | int, value: str, flag: str, *, in_env: bool) -> str:
        if isinstance(key, str):
            if is_secret_variable(key) if in_env else is_secret_option(key):
                return self._hide(key, value)
        elif flag and not value.startswith("--"):  # the word after a flag of a command
            if is_secret_option(flag) or _is_user_with_password(flag, value):
                return self._hide(flag, value)
        elif value.startswith("--") and "=" in value and is_secret_option(value.partition("=")[0]):
            name, _, given = value.partition("=")
            return f"{name}={self._hide(name, given)}"
        return self.mask_text(value)

    def mask_text(self, text: str) -> str:
        """Return a text with the secrets in it masked: a line of shell, an address, a comment."""
        text = _USERINFO.sub(self._userinfo, text)
        text = _ASSIGNMENT.sub(lambda found: self._named(found, secret=is_secret_variable(found[1])), text)
        text = _HEADER.sub(lambda found: self._named(found, secret=is_secret_variable(found[1])), text)
        text = _FLAG.sub(
            lambda found: self._named(
                found, secret=is_secret_option(found[1]) or _is_user_with_password(found[1], found[2])
            ),
            text,
        )
        text = _BEARER.sub(lambda found: found[0].replace(found[1], self._hide("Bearer", found[1])), text)
        return _WELL_KNOWN.sub(lambda found: self._hide("token", found[0]), text)

    def mask_comment(self, comment: str) -> str:
        """Return a comment of a file with the secrets in it masked, such as a setting that was commented out."""
        setting = re.sub(r" *= *", "=", comment)
        shown = self.mask_text(setting)
        return comment if shown == setting else shown

    def _userinfo(self, found: re.Match[str]) -> str:
        scheme, user = found[1], found[2]
        # Over HTTP a user alone is a token; of others, such as ssh, it is a name.
        if ":" not in user and not scheme.lower().startswith("http"):
            return found[0]
        return f"{scheme}://{self._hide('password in a URL', user)}@"

    def _named(self, found: re.Match[str], *, secret: bool) -> str:
        """Return a match of name and value, with the value masked if it is a secret."""
        if not secret:
            return found[0]
        before = found[0][: found.start(2) - found.start()]
        return before + self._hide(found[1], found[2].strip(QUOTES)) + found[0][found.end(2) - found.start() :]

    def _hide(self, name: str, value: str) -> str:
        if value == MASK:
            return value
        self.masked.add(name.lstrip("-"))
        for secret in (value, value.partition(":")[2]):  # of user:password the password may stand alone elsewhere
            self._learn(name.lstrip("-"), secret)
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
        """Length of the longest value that ``mask_bytes`` masks."""
        return max(map(len, self._names), default=1)
