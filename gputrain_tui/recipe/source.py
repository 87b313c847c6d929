"""Parses a recipe's text into values without validation, finds the line of each key, and applies ``--set``.

``tomllib`` and ``json`` return no positions, so a small scanner finds the line of every key in text that they accept.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.contract.errors import RequestError, nearest, quoted

T = TypeVar("T")
Key = tuple[str | int, ...]
"""Path of a value: table names and list positions."""

TOP_LEVEL_KEYS = ("name", "cluster", "slurm", "train", "task", "report")
STDIN = "stdin"
MAX_RECIPE_BYTES = 1 << 20
"""Limit of a recipe's file: recipes have a few KiB, a larger file was named by mistake."""
MAX_DEPTH = 32
"""Limit of nested tables and lists; a recipe needs five, and recursive functions read them."""
MAX_INT_BITS = 1000
"""Limit of an integer: a larger one fits no ``float``, and Python refuses to print more than 4,300 digits."""
TOO_DEEP = "is nested too deeply to be a recipe"
TOO_MANY_DIGITS = "contains a number with too many digits"


def dotted(key: Key) -> str:
    """Return a key in the syntax of ``--set``: ``cluster.nodes[0].gpus``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, kw_only=True)
class Source:
    """The text of a recipe and its values, not validated."""

    name: str
    """The file as the user named it, or ``stdin``."""
    text: str
    format: Literal["toml", "json"]
    data: Mapping[str, Any]
    overridden: frozenset[Key] = frozenset()
    origins: Mapping[Key, Key] = field(default_factory=dict)
    """Key of the values → key of the text, if the text was translated."""

    @property
    def default_name(self) -> str:
        """Name of a recipe without ``name``: the file's name without suffix."""
        return "recipe" if self.name == STDIN else Path(self.name).stem

    @cached_property
    def lines(self) -> dict[Key, int]:
        """The line of every key in the text, from 1."""
        return key_lines(self.text, self.format)

    def is_text(self, key: Key) -> bool:
        """Whether a value may be given as text: it comes from ``--set``, or from another program's configuration."""
        overridden = any(key[: len(path)] == path or path[: len(key)] == key for path in self.overridden)
        return overridden or bool(self.origins)

    def where(self, key: Key) -> str:
        """Return the location of a key for messages: ``FILE:LINE: key`` or ``--set key``."""
        written = self.origins.get(key, key)
        for path in (key, written):
            if any(path[:length] in self.overridden for length in range(1, len(path) + 1)):
                return f"--set {dotted(path)}"
        if entry := next((path for path in self.overridden if path[:-1] == key and isinstance(path[-1], int)), None):
            return f"--set {dotted(entry)}"
        if written not in self.lines and any(path[: len(key)] == key for path in self.overridden):
            return f"--set {dotted(key)}"
        known = (self.lines.get(written[:length]) for length in range(len(written), 0, -1))
        line = next((f"{line}:" for line in known if line is not None), "")
        return f"{self.name}:{line} {dotted(written)}"

    def require(self, key: Key, value: Any, kind: type[T], what: str) -> T:
        """Return the value of a key; raise RequestError where it is of another type, with ``what`` it must be."""
        if not isinstance(value, kind):
            raise RequestError(f"{self.where(key)} is {quoted(value)}, but must be {what}")
        return value


def read(source: str) -> Source:
    """Read a recipe's text from a file, or from standard input for ``-``, and parse it."""
    if source == "-":  # bytes, since a recipe is UTF-8 in any locale
        return parse(_decode(sys.stdin.buffer.read(MAX_RECIPE_BYTES + 1), STDIN), name=STDIN)
    if not source:
        raise RequestError("the recipe's name is empty; it is a TOML or JSON file, or - for standard input")
    path = Path(source)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except FileNotFoundError:
        raise RequestError(f"{source}: there is no such file{_similar_file(path)}") from None
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror}") from None
    return parse(_decode(content, source), name=source)


def _decode(content: bytes, name: str) -> str:
    if len(content) > MAX_RECIPE_BYTES:
        raise RequestError(f"{name} is longer than {MAX_RECIPE_BYTES >> 20} MiB, too long for a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text (byte {error.start})") from None


def _similar_file(path: Path) -> str:
    """Return the file in the same folder with the nearest name to a missing one, as the end of a message."""
    try:
        names = {entry.name for entry in path.parent.iterdir() if entry.suffix in (".toml", ".json")}
    except OSError:
        return ""
    return nearest(path.name, names) or nearest(path.name + ".toml", names)


def parse(text: str, *, name: str) -> Source:
    """Parse a recipe's text as JSON when it starts with a brace, as TOML otherwise."""
    text = text.replace("\r\n", "\n")
    is_json = name.endswith(".json") or re.match(r"\s*(?:\[\s*)?\{", text) is not None
    data = _readable(lambda: _json(text, name) if is_json else _toml(text, name), where=name)
    return Source(name=name, text=text, format="json" if is_json else "toml", data=data)


def _readable(parse: Callable[[], Any], *, where: str) -> Any:
    """Return parsed values; raise for those that are nested too deeply, and for numbers that are too large."""
    try:
        data = parse()
        problem = _excess(data)
    except RecursionError:
        problem = TOO_DEEP
    except (RequestError, tomllib.TOMLDecodeError):
        raise
    except ValueError:  # of int(): the parsers let it through
        problem = TOO_MANY_DIGITS
    if problem:
        raise RequestError(f"{where}: {problem}")
    return data


def _excess(value: Any, depth: int = 0) -> str:
    """Return what exceeds ``MAX_DEPTH`` or, as TOML's hexadecimal integers can, ``MAX_INT_BITS``; empty if nothing."""
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            return TOO_DEEP
        items = value.values() if isinstance(value, dict) else value
        return next(filter(None, (_excess(item, depth + 1) for item in items)), "")
    return TOO_MANY_DIGITS if isinstance(value, int) and value.bit_length() > MAX_INT_BITS else ""


def _toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, line = str(error), ""
        if match := re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL):
            number = int(match[2] or text.rstrip().count("\n") + 1)
            message, line = match[1], f"{number}:"
            wrong = text.split("\n")[number - 1]
            if message == "Invalid value" and (bare := _BARE_TEXT.fullmatch(wrong)):
                message += f'; a text needs quotes: {bare[1]} = "{bare[2]}"'
            elif comma := _DECIMAL_COMMA.fullmatch(wrong):
                message += f"; a number has a decimal point: {comma[1]} = {comma[2]}.{comma[3]}"
            elif wrong.strip() == "[cluster.nodes]":
                message += "; write [[cluster.nodes]] before each node"
        script = f"; for a script: gputrain init -- torchrun {name}" if name.endswith((".py", ".sh")) else ""
        raise RequestError(f"{name}:{line} is not valid TOML: {' '.join(message.split())}{script}") from None


def _json(text: str, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Refuse a key that an object has twice: ``json`` would silently keep the last value."""
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                positions = [match.start() for match in re.finditer(rf"{re.escape(json.dumps(key))}\s*:", text)]
                # More than two matches: the key is in other objects as well, and the line is unknown.
                line = f":{text.count(chr(10), 0, positions[1]) + 1}" if len(positions) == 2 else ""
                raise RequestError(f"{name}{line}: {quoted(key)} occurs twice in one object; keep one of them")
            values[key] = value
        return values

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name}:{error.lineno}: is not valid JSON: {error.msg}") from None
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else quoted(data)
        raise RequestError(f"{name}: a JSON recipe must be an object in braces, but this is {kind}")
    return data


_DECIMAL_COMMA = re.compile(r"\s*([\w.]+)\s*=\s*(\d+),(\d+)\s*(?:#.*)?")
_BARE_TEXT = re.compile(r"""\s*([\w.-]+)\s*=\s*(?!(?i:true|false)\b)([A-Za-z_./~][^\s"'#]{,80})\s*(?:\#.*)?""")
_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<quoted>\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*')
    |(?P<newline>\n)
    |(?P<punctuation>[\[\]{}=:,.])
    |(?P<bare>[^\s\[\]{}=:,.#"']+)
    """,
    re.VERBOSE | re.DOTALL,
)


class _Scanner:
    """Records the line of every key in valid TOML or JSON."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Key, int] = {}
        self.tokens: list[tuple[str, str, int]] = []
        self.position = 0
        line = 1
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup or ""
            if kind != "skip":
                self.tokens.append((kind, match[0], line))
            line += match[0].count("\n")
        self.tokens.append(("end", "", line))

    @property
    def line(self) -> int:
        return self.tokens[self.position][2]

    def peek(self) -> str:
        kind, text, _ = self.tokens[self.position]
        return text if kind in ("punctuation", "newline", "end") else kind

    def skip(self, *tokens: str) -> None:
        while self.peek() in tokens:
            self.position += 1

    def names(self) -> list[str]:
        """Consume ``a."b".c``."""
        names = []
        while self.peek() in ("bare", "quoted", "."):
            kind, text, _ = self.tokens[self.position]
            if kind != "punctuation":
                names.append(_unquoted(text) if kind == "quoted" else text)
            self.position += 1
        return names

    def key(self, table: Key) -> Key:
        """Consume ``a."b".c`` and record it; return its path, which begins with ``table``."""
        line, path = self.line, table
        for name in self.names():
            path = (*path, name)
            self.lines.setdefault(path, line)
        return path

    def value(self, path: Key) -> None:
        """Consume a value and record the keys inside it."""
        opening = self.peek()
        if opening not in ("[", "{"):
            while self.peek() not in (",", "]", "}", "\n", ""):
                self.position += 1
            return
        self.position += 1
        self.skip("\n", ",")
        index = 0
        while self.peek() not in ("]", "}", ""):
            if opening == "[":
                inner: Key = (*path, index)
                self.lines[inner] = self.line
                index += 1
            else:
                inner = self.key(path)
                self.skip("\n", "=", ":")
            self.value(inner)
            self.skip("\n", ",")
        self.position += 1

    def toml(self) -> None:
        table: Key = ()
        counts: dict[Key, int] = {}
        self.skip("\n")
        while self.peek() != "":
            if self.peek() == "[":
                table = self.header(counts)
            else:
                path = self.key(table)
                self.skip("=")
                self.value(path)
            self.skip("\n")

    def header(self, counts: dict[Key, int]) -> Key:
        """Consume a table's header; return its path, with the latest position in each array of tables."""
        line = self.line
        self.position += 1
        is_array = self.peek() == "["
        self.skip("[")
        path: Key = ()
        names = self.names()
        for depth, name in enumerate(names, start=1):
            path = (*path, name)
            self.lines.setdefault(path, line)
            if is_array and depth == len(names):
                counts[path] = counts.get(path, 0) + 1
            if path in counts:
                path = (*path, counts[path] - 1)
        self.lines[path] = line
        self.skip("]")
        return path


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text)) if text.startswith('"') else text.strip("'")
    except ValueError:  # an escape that JSON does not have
        return text.strip('"')


def key_lines(text: str, format: Literal["toml", "json"]) -> dict[Key, int]:
    """Return the line, from 1, of every key in text that ``tomllib`` or ``json`` accepts."""
    scanner = _Scanner(text)
    if format == "toml":
        scanner.toml()
    else:
        scanner.skip("\n")
        scanner.value(())
    return scanner.lines


def override(data: Mapping[str, Any], settings: Sequence[str]) -> tuple[dict[str, Any], frozenset[Key]]:
    """Return the values with ``KEY=VALUE`` settings applied, and the keys that they set.

    A value is TOML, or else plain text: words need no quotes.
    """
    result = copy.deepcopy(dict(data))
    keys: set[Key] = set()
    for setting in settings:
        name, equals, text = setting.partition("=")
        parts = [part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")]
        if not equals or not all(parts):
            raise RequestError(f"--set {setting} is not KEY=VALUE, such as --set train.lr=0.5")
        value = _parse_setting(text.strip(), where=f"--set {name.strip()}")
        if len(parts) > MAX_DEPTH:
            raise RequestError(f"--set {parts[0]}: {TOO_DEEP}")
        keys.add(_assign(result, parts, value, name.strip(), text.strip()))
    return result, frozenset(keys)


def _assign(data: dict[str, Any], parts: Sequence[str], value: Any, name: str, text: str) -> Key:
    """Set the value of a key, or its text in place of an entry of a list that is text too; return the key."""
    node: Any = data
    key: Key = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(node, list):
            if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
                known = f"0 to {len(node) - 1}" if node else "none: the list is empty"
                is_key = node and isinstance(node[0], dict) and not part.isdecimal()
                hint = f"; did you mean {dotted((*key, 0, *parts[position:]))}?" if is_key else ""
                raise RequestError(f"--set {name}: {dotted(key)} has no entry {quoted(part)} (entries: {known}){hint}")
            step: str | int = int(part)
        elif isinstance(node, dict):
            step = part
            if not last:
                node.setdefault(part, {})
        else:
            raise RequestError(f"--set {name}: {dotted(key)} is {quoted(node)}, which has no keys")
        key = (*key, step)
        if last:
            is_word = isinstance(node, list) and isinstance(node[int(step)], str)
            node[step] = text if is_word and isinstance(value, bool | int | float) else value
        else:
            node = node[step]
    return key


def _parse_setting(text: str, *, where: str) -> Any:
    if "\n" in text:
        return text
    try:
        value = _readable(lambda: tomllib.loads(f"value = {text}")["value"], where=where)
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text
