"""Filter line of every list, such as ``host:n1 state:failed late>5``: a row must match every word."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.contract.errors import RequestError, nearest

Row = TypeVar("Row")
Value = float | str | None

_WORD = re.compile(r"(?P<key>[a-z_]+)(?P<sign><=|>=|!=|[:=<>])(?P<value>.*)", re.IGNORECASE)
_NAMED = re.compile(r"(?P<family>[a-z]+):(?P<name>.+?)(?:(?P<sign><=|>=|!=|[=<>])(?P<value>[^<>=]+))?", re.IGNORECASE)
"""A column of a family, such as ``metric:accuracy>0.9``, or without a comparison."""
_NUMBER = r"[-+]?[\d.]+(?:e[-+]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})(?:-(?P<high>{_NUMBER}))?", re.IGNORECASE)
"""A number, or two with a dash between them, which is not the sign of an exponent."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, kw_only=True)
class FilterColumn(Generic[Row]):
    """Column by which rows are filtered."""

    key: str
    is_number: bool
    value: Callable[[Row], Value]
    """Returns the row's value; None without one, which matches no comparison."""
    allowed: Sequence[str] = ()
    """All values of a text column that has few; empty: it may be any text."""


class RowFilter(Generic[Row]):
    """Filter of rows; without words all rows match; ``anywhere``: whether a row matches a word without a column.

    Raises:
        RequestError: a word is not valid; the message names the allowed forms.
    """

    def __init__(
        self,
        text: str,
        columns: Mapping[str, FilterColumn[Row]],
        anywhere: Callable[[str, Row], bool],
        families: Mapping[str, Callable[[str], FilterColumn[Row]]] = {},
    ) -> None:
        """Read a line; ``families`` return the column of a name, by what is before the colon."""
        self.text = " ".join(text.split())
        self._families = families
        self._columns = columns
        self._anywhere = anywhere
        self.named: list[str] = []
        """Names of columns of families in it."""
        self._tests: Sequence[Callable[[Row], bool]] = [self._test(word) for word in self.text.split()]

    def keeps(self, row: Row) -> bool:
        return all(test(row) for test in self._tests)

    def _test(self, word: str) -> Callable[[Row], bool]:
        """Return the predicate of one word; a leading ``!`` negates it."""
        if word.startswith("!") and len(word) > 1:
            inner = self._test(word[1:])
            return lambda row: not inner(row)
        named = _NAMED.fullmatch(word)
        if named is not None and (family := self._families.get(named["family"].lower())) is not None:
            own = family(named["name"])
            self.named.append(named["name"])
            if named["sign"] is None:
                return lambda row: own.value(row) is not None
            return _compared(own, word, named["sign"], named["value"])
        match = _WORD.fullmatch(word)
        if match is None:
            return lambda row: self._anywhere(word, row)
        key, sign, value = match["key"].lower(), match["sign"], match["value"]
        column = self._columns.get(key)
        if column is None:
            known = [*self._columns, *(f"{family}:NAME" for family in self._families)]
            guess = nearest(key, self._columns) or "; one of " + ", ".join(known)
            raise RequestError(f"filter {word!r}: no column {key!r}{guess}")
        if not column.is_number:
            if sign not in (":", "=", "!="):
                raise RequestError(f"filter {word!r}: {key} is text; write {key}:WORD or {key}=WHOLE")
            matches = _matcher(sign, value)
            if column.allowed and not any(map(matches, column.allowed)):  # would match nothing, or with != everything
                guess = nearest(value, column.allowed) or f"; one of {', '.join(column.allowed)}"
                raise RequestError(f"filter {word!r}: no {column.key} is {value!r}{guess}")
            if sign == "!=":
                return lambda row: not matches(str(column.value(row) or ""))
            return lambda row: matches(str(column.value(row) or ""))
        return _numbers(column, word, value) if sign == ":" else _compared(column, word, sign, value)


def _matcher(sign: str, value: str) -> Callable[[str], bool]:
    """Return whether a text is a value, or after ``:`` has a word that begins with it; there ``*`` is any text.

    The number at the end of a word is one itself, as in ``node001``.
    """
    wanted = value.casefold()
    if sign != ":":
        return lambda text: text.casefold() == wanted
    at_word = r"(?<!\d)" if wanted[:1].isdecimal() else r"(?<![^\W_])" if wanted[:1].isalnum() else ""
    pattern = re.compile(at_word + ".*".join(map(re.escape, wanted.split("*"))))
    return lambda text: pattern.search(text.casefold()) is not None


def _numbers(column: FilterColumn[Row], word: str, value: str) -> Callable[[Row], bool]:
    """Return the predicate of a list of numbers and ranges, such as ``0-7,12``."""
    ranges: list[tuple[float, float]] = []
    for part in value.split(","):
        match = _RANGE.fullmatch(part)
        try:
            low, high = (match["low"], match["high"] or match["low"]) if match else (part, part)
            ranges.append((float(low), float(high)))
        except ValueError:
            raise RequestError(f"filter {word!r}: expected numbers or ranges, such as {column.key}:0-7,12") from None

    def test(row: Row) -> bool:
        number = column.value(row)
        return isinstance(number, int | float) and any(low <= number <= high for low, high in ranges)

    return test


def _compared(column: FilterColumn[Row], word: str, sign: str, value: str) -> Callable[[Row], bool]:
    try:
        limit = float(value)
    except ValueError:
        raise RequestError(f"filter {word!r}: expected a number, such as {column.key}>5") from None
    compare = _COMPARE[sign]

    def test(row: Row) -> bool:
        number = column.value(row)
        return isinstance(number, int | float) and compare(number, limit)

    return test
