"""Parses a recipe's text into values without validation, finds the line of each key, and applies ``--set``.

``tomllib`` and ``json`` return no positions, so a small scanner finds the line of every key in text that they accept.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

from trainer.contract.errors import RequestError, nearest, quoted

Key = tuple[str | int, ...]
"""Path of a value: table names and list positions."""

TOP_LEVEL_KEYS = ("name", "cluster", "slurm", "train", "task", "report")

STDIN = "stdin"
"""Name of standard input in messages."""

MAX_RECIPE_BYTES = 1 << 20
"""Limit of a recipe's file: recipes have a few KiB, a larger file was named by mistake."""

MAX_DEPTH = 32
"""Limit of nested tables and lists; a recipe needs five, and recursive functions read them."""

MAX_INT_BITS = 1000
"""Limit of an integer: a larger one fits no ``float``, and Python refuses to print more than 4,300 digits."""

TOO_MANY_DIGITS = "contains a number with too many digits"


class RecipeError(RequestError):
    """A recipe is invalid; the message is one line with file, line, key, the value found and the allowed ones."""


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
    """Keys set by ``--set``."""
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
        if written not in self.lines and any(path[: len(key)] == key for path in self.overridden):
            return f"--set {dotted(key)}"
        for length in range(len(written), 0, -1):
            line = self.lines.get(written[:length])
            if line is not None:
                return f"{self.name}:{line}: {dotted(written)}"
        return f"{self.name}: {dotted(written)}"


def read(source: str, *, stdin: IO[str] | None = None) -> Source:
    """Read a recipe's text from a file, or from standard input for ``-``, and parse it.

    Raises:
        RecipeError: the file cannot be read, or is neither TOML nor JSON.
    """
    if source == "-":
        if stdin is None:
            raise RecipeError("the recipe is '-', but there is no standard input to read it from")
        return parse(_decode(_read_stdin(stdin), STDIN), name=STDIN)
    if not source:
        raise RecipeError("the recipe's name is empty; it is a TOML or JSON file, or - for standard input")
    path = Path(source)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError(f"{source}: there is no such file{_similar_file(path)}") from None
    except OSError as error:
        raise RecipeError(f"{source} cannot be read: {error.strerror}") from None
    return parse(_decode(content, source), name=source)


def _read_stdin(stdin: IO[str]) -> bytes:
    """Return bytes, since a recipe is UTF-8 in any locale."""
    binary = getattr(stdin, "buffer", None)
    content = stdin.read(MAX_RECIPE_BYTES + 1) if binary is None else binary.read(MAX_RECIPE_BYTES + 1)
    return content if isinstance(content, bytes) else str(content).encode("utf-8", "surrogateescape")


def _decode(content: bytes, name: str) -> str:
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError(f"{name} is longer than {MAX_RECIPE_BYTES >> 20} MiB, too long for a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name} is not UTF-8 text (byte {error.start})") from None


def _similar_file(path: Path) -> str:
    """Return the file in the same folder with the nearest name to a missing one, as the end of a message."""
    try:
        names = {entry.name for entry in path.parent.iterdir() if entry.suffix in (".toml", ".json")}
    except OSError:
        return ""
    return nearest(path.name, names) or nearest(path.name + ".toml", names)


def parse(text: str, *, name: str) -> Source:
    """Parse a recipe's text as JSON when it starts with a brace, as TOML otherwise.

    Raises:
        RecipeError: the text is invalid; the message has the line.
    """
    text = text.replace("\r\n", "\n")
    json_like = text.lstrip()[:1] == "{" or name.endswith(".json")
    try:
        data = _json(text, name) if json_like else _toml(text, name)
    except RecursionError:
        raise RecipeError(f"{name}: is nested too deeply to be a recipe") from None
    except RecipeError:
        raise
    except ValueError:  # of int(): the parsers let it through
        raise RecipeError(f"{name}: {TOO_MANY_DIGITS}") from None
    if is_too_deep(data):
        raise RecipeError(f"{name}: is nested too deeply to be a recipe")
    if holds_huge_number(data):
        raise RecipeError(f"{name}: {TOO_MANY_DIGITS}")
    return Source(name=name, text=text, format="json" if json_like else "toml", data=data)


def is_too_deep(data: Any) -> bool:
    """Whether tables and lists are nested more deeply than ``MAX_DEPTH``."""
    level = [data]
    for _ in range(MAX_DEPTH):
        within = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        level = [item for item in within if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def holds_huge_number(value: Any) -> bool:
    """Whether an integer exceeds ``MAX_INT_BITS``, as TOML's hexadecimal ones can."""
    if isinstance(value, dict | list):
        return any(map(holds_huge_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > MAX_INT_BITS


def _toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if text.lstrip()[:1] == "[" and _is_json(text):
            _json(text, name)  # raises the better message: a list is no recipe
        message, line = str(error), ""
        if match := re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL):
            message, line = match[1], f"{match[2] or text.rstrip().count(chr(10)) + 1}:"
        raise RecipeError(f"{name}:{line} is not valid TOML: {' '.join(message.split())}") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return False
    return True


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except _DuplicateKeyError as error:
        positions = [match.start() for match in re.finditer(rf"{re.escape(json.dumps(error.key))}\s*:", text)]
        # More than two matches: the key is in other objects as well, and the line is unknown.
        line = f":{text.count(chr(10), 0, positions[1]) + 1}" if len(positions) == 2 else ""
        raise RecipeError(f"{name}{line}: {quoted(error.key)} occurs twice in one object; keep one of them") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"{name}:{error.lineno}: is not valid JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{name}: a JSON recipe must be an object in braces, but this is {_json_type(data)}")
    return data


class _DuplicateKeyError(ValueError):
    """A JSON object has a key twice; ``json`` would silently keep the last value."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for index, key in enumerate(keys) if key in keys[:index]))
    return result


def _json_type(data: Any) -> str:
    """Return the type of a JSON value in words."""
    if data is None or isinstance(data, bool):
        return json.dumps(data)
    return "a list" if isinstance(data, list) else "a string" if isinstance(data, str) else "a number"


_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<quoted>\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*')
    |(?P<newline>\n)
    |(?P<mark>[\[\]{}=:,.])
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

    def peek(self) -> str:
        kind, text, _ = self.tokens[self.position]
        return text if kind in ("mark", "newline", "end") else kind

    def skip(self, *marks: str) -> None:
        while self.peek() in marks:
            self.position += 1

    def key(self, table: Key) -> tuple[Key, int]:
        """Consume ``a."b".c``; return its path, which begins with ``table``, and its line."""
        line = self.tokens[self.position][2]
        parts: list[str] = []
        while self.peek() in ("bare", "quoted", "."):
            kind, text, _ = self.tokens[self.position]
            if kind == "quoted":
                parts.append(_unquoted(text))
            elif kind == "bare":
                parts.append(text)
            self.position += 1
        path = (*table, *parts)
        for length in range(len(table) + 1, len(path) + 1):
            self.lines.setdefault(path[:length], line)
        return path, line

    def value(self, path: Key) -> None:
        """Consume a value and record the keys inside it."""
        mark = self.peek()
        if mark == "[":
            self.position += 1
            index = 0
            self.skip("\n", ",")
            while self.peek() not in ("]", ""):
                self.lines[(*path, index)] = self.tokens[self.position][2]
                self.value((*path, index))
                index += 1
                self.skip("\n", ",")
            self.position += 1
        elif mark == "{":
            self.position += 1
            self.skip("\n", ",")
            while self.peek() not in ("}", ""):
                inner, _ = self.key(path)
                self.skip("\n")
                self.skip("=", ":")
                self.skip("\n")
                self.value(inner)
                self.skip("\n", ",")
            self.position += 1
        else:
            while self.peek() not in (",", "]", "}", "\n", ""):
                self.position += 1

    def toml(self) -> None:
        table: Key = ()
        counts: dict[Key, int] = {}
        while self.peek() != "":
            self.skip("\n")
            if self.peek() == "":
                break
            if self.peek() == "[":
                self.position += 1
                is_array = self.peek() == "["
                self.skip("[")
                header, line = self._header(counts, is_array)
                if is_array:
                    counts[header] = counts.get(header, 0) + 1
                    header = (*header, counts[header] - 1)
                self.lines[header] = line
                table = header
                self.skip("]")
            else:
                path, _ = self.key(table)
                self.skip("=")
                self.value(path)

    def _header(self, counts: Mapping[Key, int], is_array: bool) -> tuple[Key, int]:
        """Consume a table's header; return its line and its path, with the latest position in each array of tables."""
        lines = dict(self.lines)
        names, line = self.key(())
        self.lines = lines  # without those that key() records: the path below has list positions
        path: Key = ()
        for position, name in enumerate(names):
            path = (*path, name)
            if path in counts and not (is_array and position == len(names) - 1):
                path = (*path, counts[path] - 1)
            self.lines.setdefault(path, line)
        return path, line


def _unquoted(text: str) -> str:
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return text.strip('"')
    return text.strip("'")


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

    Raises:
        RecipeError: a setting without ``=``, or a key below a value that is no table.
    """
    result = copy.deepcopy(dict(data))
    keys: set[Key] = set()
    for setting in settings:
        name, equals, text = setting.partition("=")
        parts = [part.strip() for part in re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")]
        if not equals or not all(parts):
            raise RecipeError(f"--set {setting} is not KEY=VALUE, such as --set train.lr=0.5")
        value = _parse_setting(text.strip(), name.strip())
        if len(parts) > MAX_DEPTH or is_too_deep([value]):
            raise RecipeError(f"--set {parts[0]}: is nested too deeply to be a recipe")
        if holds_huge_number(value):
            raise RecipeError(f"--set {name.strip()}: {TOO_MANY_DIGITS}")
        keys.add(_assign(result, parts, value, name.strip()))
    return result, frozenset(keys)


def _assign(data: dict[str, Any], parts: Sequence[str], value: Any, name: str) -> Key:
    node: Any = data
    key: Key = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(node, list):
            if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
                known = f"0 to {len(node) - 1}" if node else "none: the list is empty"
                raise RecipeError(f"--set {name}: {dotted(key)} has no entry {quoted(part)} (entries: {known})")
            step: str | int = int(part)
        elif isinstance(node, dict):
            step = part
            if not last:
                node.setdefault(part, {})
        else:
            raise RecipeError(f"--set {name}: {dotted(key)} is {quoted(node)}, which has no keys")
        key = (*key, step)
        if last:
            node[step] = value
        else:
            node = node[step]
    return key


def _parse_setting(text: str, name: str) -> Any:
    if "\n" in text:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise RecipeError(f"--set {name}: is nested too deeply to be a recipe") from None
    except ValueError:
        raise RecipeError(f"--set {name}: {TOO_MANY_DIGITS}") from None
    return value if isinstance(value, bool | int | float | str | list | dict) else text
