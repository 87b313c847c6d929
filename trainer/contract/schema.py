"""Option schemas: one declaration becomes a flag, a recipe key, a form field and a line of help.

A schema is a ``msgspec.Struct`` (or a dataclass, for a user's task) whose fields are annotated with ``Meta``:
``description`` is the help, ``ge``/``gt``/``le``/``lt`` the range, ``extra`` may hold ``group``, ``aliases``,
``spellings``, ``switches``, ``per_rank`` and ``or_kind``.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, inspect as mi

from trainer.contract.errors import RequestError, nearest, quoted

S = TypeVar("S")

MAX_INT_BITS = 63
"""Bits of the largest integer that torch and the record can hold."""

Positive = Annotated[int, Meta(ge=1)]
Positives = Annotated[tuple[Positive, ...], Meta(min_length=1)]

NONE = "none"
"""Text that means None, for an optional option whose default is not None."""


def option_meta(group: str, description: str, **facts: Any) -> Meta:
    """Return the ``Meta`` of an option; ``facts`` are limits, such as ``ge``, and entries of ``extra``."""
    limits = {name: facts.pop(name) for name in ("ge", "gt", "le", "lt", "min_length", "max_length") if name in facts}
    return Meta(description=description, extra={"group": group, **facts}, **limits)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option, with everything that a flag, a form field or a help text needs."""

    name: str
    """Recipe key, with underscores."""
    kind: Literal["bool", "int", "float", "str", "list"]
    item_kind: str | None = None
    default: Any = None
    required: bool = False
    optional: bool = False
    """Whether None is a value: the option may be left out."""
    choices: tuple[str | int, ...] = ()
    minimum: int | float | None = None
    maximum: int | float | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    min_items: int = 0
    max_items: int | None = None
    help: str = ""
    group: str = ""
    aliases: tuple[str, ...] = ()
    """Further flags, complete with their dashes."""
    spellings: dict[str, str] = {}
    """Other names of choices, such as class names of fairseq, and the choice that each stands for."""
    switches: dict[str, str] = {}
    """Flags without a value, complete with their dashes, and the value that each stands for; also the option's own."""
    per_rank: bool = False
    """Whether ranks of one training may have different values: paths, and options of speed such as threads."""
    or_kind: Literal["", "int", "bool", "list"] = ""
    """Type that a text option accepts besides text and converts to it: a column has a name or a number, and weights are
    a word or a list of numbers."""
    words: tuple[str, ...] = ()
    """Texts that an option of another kind accepts as they are, such as ``balanced``."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        one = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "text"}
        if self.or_kind:
            one["str"] = f"text or {one.get(self.or_kind, 'a list of numbers')}"
        many = {"int": "integers", "float": "numbers", "str": "texts"}
        text = one[self.kind] if self.kind != "list" else f"{self._how_many} {many.get(self.item_kind or '', 'values')}"
        bounds = []
        if self.minimum is not None:
            bounds.append(f"{'>' if self.exclusive_minimum else '>='} {self.minimum}")
        if self.maximum is not None:
            bounds.append(f"{'<' if self.exclusive_maximum else '<='} {self.maximum}")
        return ", or ".join([" ".join([text, " and ".join(bounds)]).rstrip(), *self.words])

    @property
    def _how_many(self) -> str:
        if self.min_items == self.max_items:
            return str(self.min_items)
        if self.max_items is not None:
            return f"{self.min_items} to {self.max_items}"
        return "one or more" if self.min_items == 1 else f"{self.min_items} or more" if self.min_items else "a list of"


def describe(schema: type[Any]) -> list[Option]:
    """Return the options of a schema in the order of their declaration."""
    return list(_options(schema))  # type: ignore[arg-type]  # mypy checks the hash of instances, not of the class


# Reading annotations takes milliseconds, and a recipe of many nodes needs the same schemas again and again. Bounded,
# because the schemas of users' tasks are made at run time.
@lru_cache(maxsize=64)
def _options(schema: Hashable) -> tuple[Option, ...]:
    info = mi.type_info(schema)
    assert isinstance(info, mi.StructType | mi.DataclassType)
    hints = _hints(schema)
    return tuple(_option(field, _meta(hints[field.name])) for field in info.fields)


@lru_cache(maxsize=64)
def _hints(schema: Hashable) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _meta(hint: Any) -> Meta:
    """Return the ``Meta`` of a hint, also inside a union such as ``Annotated[int, Meta(...)] | None``."""
    for member in (hint, *get_args(hint)):
        if get_origin(member) is Annotated:
            notes = [note for note in get_args(member)[1:] if isinstance(note, Meta)]
            return next((note for note in notes if note.description or note.extra), Meta())
    return Meta()


def _without_metadata(node: mi.Type) -> Any:
    return node.type if isinstance(node, mi.Metadata) else node


def _option(field: mi.Field, meta: Meta) -> Option:
    node = _without_metadata(field.type)
    optional = isinstance(node, mi.UnionType) and any(isinstance(member, mi.NoneType) for member in node.types)
    words: tuple[Any, ...] = ()
    if isinstance(node, mi.UnionType):
        members = [_without_metadata(member) for member in node.types if not isinstance(member, mi.NoneType)]
        node = next((member for member in members if not isinstance(member, mi.LiteralType)), members[0])
        words = tuple(
            word
            for member in members
            if member is not node and isinstance(member, mi.LiteralType)
            for word in member.values
        )
    item = _without_metadata(node.item_type) if isinstance(node, mi.ListType | mi.VarTupleType) else None
    low, above, high, below = (getattr(item or node, name, None) for name in ("ge", "gt", "le", "lt"))
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    choices = node.values if isinstance(node, mi.LiteralType) else ()
    extra: Mapping[str, Any] = meta.extra or {}
    return Option(
        name=field.name,
        kind=_kind(node),
        item_kind=_kind(item) if item is not None else None,
        default=None if default is msgspec.NODEFAULT else default,
        required=field.required,
        optional=optional,
        choices=tuple(value for value in choices if isinstance(value, str | int)),
        minimum=above if low is None else low,
        maximum=below if high is None else high,
        exclusive_minimum=above is not None,
        exclusive_maximum=below is not None,
        min_items=getattr(node, "min_length", None) or 0 if item is not None else 0,
        max_items=getattr(node, "max_length", None) if item is not None else None,
        help=meta.description or "",
        group=str(extra.get("group", "")),
        aliases=tuple(extra.get("aliases", ())),
        spellings=dict(extra.get("spellings", {})),
        switches=dict(extra.get("switches", {})),
        per_rank=bool(extra.get("per_rank")),
        or_kind=extra.get("or_kind", ""),
        words=words,
    )


def _kind(node: Any) -> Any:
    if isinstance(node, mi.LiteralType):
        return "int" if all(isinstance(value, int) for value in node.values) else "str"
    kinds: dict[type, str] = {
        mi.BoolType: "bool",
        mi.IntType: "int",
        mi.FloatType: "float",
        mi.StrType: "str",
        mi.ListType: "list",
        mi.VarTupleType: "list",
    }
    return kinds.get(type(node), "str")


def check(
    schema: type[S],
    values: Mapping[str, Any],
    *,
    where: Callable[[str], str],
    is_text: Callable[[str], bool] = lambda name: True,
) -> S:
    """Build an options object from untyped values by name; a scalar is taken as a list of one.

    Args:
        schema: the Struct or dataclass to build.
        values: name to value, as a recipe holds them.
        where: returns the source of an option for messages (``--batch-size``, ``recipe.toml: train.batch_size``).
        is_text: returns whether the value of an option may be given as text, as on a command line; otherwise a text is
            only taken where the option is one.

    Raises:
        RequestError: an unknown name, a wrong type, or a value out of range.
    """
    complete = check_values(describe(schema), values, where=where, is_text=is_text)
    types = _hints(schema)  # type: ignore[arg-type]  # mypy checks the hash of instances, not of the class
    for option in describe(schema):
        if option.name in complete:
            try:
                complete[option.name] = msgspec.convert(complete[option.name], types[option.name])
            except msgspec.ValidationError:  # a limit that no option has, such as the length of a text
                raise _refused(option, values[option.name], where(option.name)) from None
    return schema(**complete)


def check_values(
    options: Iterable[Option],
    values: Mapping[str, Any],
    *,
    where: Callable[[str], str],
    is_text: Callable[[str], bool] = lambda name: True,
) -> dict[str, Any]:
    """Return untyped values as the options have them; arguments and errors as of ``check``."""
    known = {option.name: option for option in options}
    complete: dict[str, Any] = {}
    for name, value in values.items():
        if (option := known.get(name)) is None:
            raise RequestError(f"{where(name)} is not known{nearest(name, known)}")
        complete[name] = check_value(option, value, where=where(name))
        if not is_text(name) and _is_quoted(option, value):
            raise RequestError(
                f"{where(name)} is {quoted(value)}, but must be {option.allowed}: write it without quotes"
            )
    for option in known.values():
        if option.required and option.name not in complete:
            raise RequestError(f"{where(option.name)} is missing: {option.help or 'it has no default'}")
    return complete


def check_value(option: Option, value: Any, *, where: str) -> Any:
    """Return an untyped value as an option has it, a list as a tuple."""
    if option.optional and (value is None or (value == NONE and option.default is not None)):
        return None
    if isinstance(value, str) and value in option.words:
        return value
    if option.or_kind == "list" and isinstance(value, list | tuple):
        given: Any = ", ".join(map(text_of, value))
    else:
        given = str(value).lower() if option.or_kind and type(value).__name__ == option.or_kind else value
    if isinstance(given, str):
        given = option.spellings.get(given, given)
    kind = option.item_kind or "str" if option.kind == "list" else option.kind
    try:
        items = [_scalar(kind, item) for item in (_items(given, kind) if option.kind == "list" else [given])]
    except ValueError:
        raise _refused(option, value, where) from None
    too_few = option.kind == "list" and len(items) < option.min_items
    too_many = option.max_items is not None and len(items) > option.max_items
    if too_few or too_many or not all(_is_allowed(option, kind, item) for item in items):
        raise _refused(option, value, where)
    return tuple(items) if option.kind == "list" else items[0]


def _is_allowed(option: Option, kind: str, value: Any) -> bool:
    """Whether a scalar, or an item of a list, has the option's type and range."""
    if type(value).__name__ != kind:
        return False
    low, high = option.minimum, option.maximum
    above = low is None or value > low or (value == low and not option.exclusive_minimum)
    below = high is None or value < high or (value == high and not option.exclusive_maximum)
    return above and below and (not option.choices or value in option.choices)


def _refused(option: Option, value: Any, where: str) -> RequestError:
    guess = nearest(value, map(str, option.choices or option.words)) if isinstance(value, str) else ""
    items = value if option.kind == "list" and isinstance(value, list | tuple) else [value]
    kind = option.item_kind or "str" if option.kind == "list" else option.kind
    if kind == "str" and not (option.choices or option.or_kind) and _lack_quotes(items):
        words = [item if isinstance(item, str) else text_of(item).lower() for item in items]
        text = msgspec.json.encode(words if option.kind == "list" else words[0]).decode()
        setting = where.removeprefix("--set ")  # whose quotes a shell would take away
        guess = f": write {text} with its quotes" if setting == where else f": write --set '{setting}={text}'"
    return RequestError(f"{where} is {quoted(value)}, but must be {option.allowed}{guess}")


def _lack_quotes(items: Sequence[Any]) -> bool:
    """Whether numbers or truth values, alone or among texts, stand where texts are allowed."""
    return any(not isinstance(item, str) for item in items) and all(
        isinstance(item, str | bool | int | float) for item in items
    )


def _is_quoted(option: Option, value: Any) -> bool:
    """Whether a value of a file has quotes where the option is a number or a truth value."""
    items = value if isinstance(value, list | tuple) else [value]
    is_word = isinstance(value, str) and value in option.words
    return (option.item_kind or option.kind) != "str" and not is_word and any(isinstance(item, str) for item in items)


def _items(value: Any, kind: str) -> Sequence[Any]:
    """Return the items of a list option given as a list, as one item, or as text: ``1,2``, ``[1, 2]`` or JSON.

    Texts may also be the words of a shell: ``--lr 0.2``.
    """
    if isinstance(value, list | tuple):
        return value
    if not isinstance(value, str):
        return [value]
    if value.startswith('["'):
        items = msgspec.json.decode(value)
        return items if isinstance(items, list) else [items]
    if kind == "str" and len(value.split()) > 1 and ", " not in value and not value.startswith("["):
        return shlex.split(value)
    return [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]


def _scalar(kind: str, value: Any) -> Any:
    """Convert text and integers to the option's kind; raise ``ValueError`` if that is impossible."""
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(value)
        return value
    if isinstance(value, str):
        parsers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _boolean}
        value = parsers[kind](value)
    if kind == "int" and isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ValueError(value)
    if isinstance(value, bool) != (kind == "bool"):
        raise ValueError(value)
    if kind == "float" and isinstance(value, int | float):
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(value)
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "yes", "1", "on", "false", "no", "0", "off"):
        raise ValueError(text)
    return text.lower() in ("true", "yes", "1", "on")


def to_flags(options: Any) -> list[str]:
    """Return the flags of all options that differ from their defaults."""
    argv: list[str] = []
    for option in describe(type(options)):
        value = getattr(options, option.name)
        if value != option.default or option.required:
            argv += flags_of(option.name, value)
    return argv


def flags_of(name: str, value: Any) -> list[str]:
    """Return an option as ``read_flags`` reads it."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    text = text_of(value)
    return [f"{flag}={text}"] if text.startswith("--") else [flag, text]


def text_of(value: Any) -> str:
    """Return an option's value as the text of a flag."""
    if value is None:
        return NONE
    if isinstance(value, list | tuple):
        if any(isinstance(item, str) and (not item or set(item) & set(',[]() "')) for item in value):
            return msgspec.json.encode(value).decode()
        return ",".join(text_of(item) for item in value)
    return repr(value) if isinstance(value, float) else str(value)


def read_flags(argv: Sequence[str], options: Iterable[Option]) -> tuple[dict[str, Any], list[str]]:
    """Read ``--flag value``, ``--flag=value``, ``--switch`` and ``--no-switch``.

    Returns:
        The values as text (booleans for switches) by option name, and the words that belong to no option.

    Raises:
        RequestError: a flag without its value, or a ``--no-switch`` with one.
    """
    names: dict[str, Option] = {}
    switches: dict[str, tuple[str, str]] = {}
    for option in options:
        switches |= {flag: (option.name, value) for flag, value in option.switches.items()}
        for flag in (option.flag, *option.aliases):
            names[flag] = option
            if option.kind == "bool":
                names["--no-" + flag[2:]] = option
    values: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        flag, equals, attached = word.partition("=")
        known = names.get(flag)
        if known is None and word in switches:
            name, value = switches[word]
            values[name] = value
        elif known is None:
            rest.append(word)
        elif known.kind == "bool":
            positive = flag in (known.flag, *known.aliases)
            if equals and not positive:
                raise RequestError(f"{flag} takes no value; write {flag} or {known.flag}")
            values[known.name] = attached if equals else positive
        elif equals:
            values[known.name] = attached
        elif queue and (not queue[0].startswith("--") or len(queue[0]) == 2):
            values[known.name] = queue.pop(0)
        elif word in switches:
            values[known.name] = switches[word][1]
        else:
            raise RequestError(f"{flag} needs a value: {known.allowed}")
    return values, rest


def unknown_option(word: str, task: str, flags: Iterable[str]) -> RequestError:
    """Return the error of a flag, with or without ``=value``, that neither the trainer nor a task has."""
    flag = word.partition("=")[0]
    return RequestError(f"{flag} is not an option of the trainer or of task {task}{nearest(flag, flags)}")
