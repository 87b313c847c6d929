"""The filter line of the rank grid: ``host:n1 state:failed late>5``, every word of which must hold."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from gputrain_tui.console.widgets.rank_columns import BY_KEY, Lateness, RankColumn
from gputrain_tui.state import RankView
from trainer.contract.errors import RequestError, nearest

Test = Callable[[RankView, Lateness], bool]

_WORD = re.compile(r"(?P<key>[a-z]+)(?P<sign><=|>=|!=|[:=<>])(?P<value>.*)", re.IGNORECASE)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


class RankFilter:
    """Filter of ranks; without words all match."""

    def __init__(self, text: str = "") -> None:
        """Read a filter line.

        Raises:
            RequestError: a word is not understood; the message says what is allowed.
        """
        self.text = " ".join(text.split())
        self._tests = [_test(word) for word in self.text.split()]

    def keeps(self, view: RankView, late: Lateness) -> bool:
        """Return whether a rank is shown."""
        return all(test(view, late) for test in self._tests)


def _test(word: str) -> Test:
    """Return the test of one word; ``!`` negates it."""
    if word.startswith("!") and len(word) > 1:
        inner = _test(word[1:])
        return lambda view, late: not inner(view, late)
    match = _WORD.fullmatch(word)
    if match is None:
        return _anywhere(word)
    key, sign, value = match["key"].lower(), match["sign"], match["value"]
    column = BY_KEY.get(key)
    if column is None:
        raise RequestError(
            f"filter {word!r}: no column {key!r}{nearest(key, BY_KEY) or '; one of ' + ', '.join(BY_KEY)}"
        )
    if column.digits is None:
        if sign not in (":", "=", "!="):
            raise RequestError(f"filter {word!r}: {key} is text; write {key}:part or {key}=whole")
        return _text(column, sign, value.casefold())
    return _numbers(column, word, value) if sign == ":" else _compared(column, word, sign, value)


def _anywhere(word: str) -> Test:
    """Return a test on rank, host, device or state."""
    if word.isdecimal():
        return lambda view, late: view.rank == int(word)
    part = word.casefold()
    return lambda view, late: any(
        part in text.casefold() for text in (view.host, view.device, view.display_state) if text is not None
    )


def _text(column: RankColumn, sign: str, wanted: str) -> Test:
    def test(view: RankView, late: Lateness) -> bool:
        text = str(column.value(view, late) or "").casefold()
        return wanted in text if sign == ":" else (text == wanted) == (sign == "=")

    return test


def _numbers(column: RankColumn, word: str, value: str) -> Test:
    """Parse a list of numbers and ranges, such as ``0-7,12``."""
    ranges: list[tuple[float, float]] = []
    for part in value.split(","):
        low, dash, high = part.partition("-")
        try:
            ranges.append((float(low), float(high if dash else low)))
        except ValueError:
            raise RequestError(f"filter {word!r}: expected numbers or ranges, such as {column.key}:0-7,12") from None

    def test(view: RankView, late: Lateness) -> bool:
        number = column.value(view, late)
        return isinstance(number, int | float) and any(low <= number <= high for low, high in ranges)

    return test


def _compared(column: RankColumn, word: str, sign: str, value: str) -> Test:
    try:
        limit = float(value)
    except ValueError:
        raise RequestError(f"filter {word!r}: expected a number, such as {column.key}>5") from None
    compare = _COMPARE[sign]

    def test(view: RankView, late: Lateness) -> bool:
        number = column.value(view, late)
        return isinstance(number, int | float) and compare(number, limit)

    return test
