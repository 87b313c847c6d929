"""Panel of the open recipe's preflight: a summary line, and the worst results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, fit_row, title_row, wrap_text
from gputrain_tui.preflight import CheckResult, errors, summary, warnings
from gputrain_tui.tables import printable


def draw_preflight(results: Sequence[CheckResult], problem: str, width: int, height: int) -> list[Row]:
    """Return a summary and the worst results; or the ``problem`` of a recipe that could not be checked."""
    title = ("preflight", "title")
    if problem:
        rows = [title_row(width, [title, ("  ✗ the recipe has an error", "error")])]
        return [*rows, *_wrapped("✗", problem, "error", width)][:height]
    if not results:
        return [title_row(width, [title, ("  checking …", "dim")])]
    stopping, doubtful = errors(results), warnings(results)
    state = ("✗", "error") if stopping else ("!", "warning") if doubtful else ("✓", "good")
    verdict = f"  {state[0]} {'ready, ' if doubtful and not stopping else ''}{summary(results)}"
    blocks = _blocks(results, width)
    shown = sum(end <= height - 1 for end in accumulate(map(len, blocks)))
    remarks: list[Row] = [[(f"{len(results)} check{'s' * (len(results) != 1)}", "dim")]]
    if shown < len(blocks):
        remarks.insert(0, [(f"{shown} of {len(blocks)} shown", "accent")])
    return [title_row(width, [title, (verdict, state[1])], remarks[::-1]), *chain(*blocks)][:height]


def _blocks(results: Sequence[CheckResult], width: int) -> list[list[Row]]:
    """Return the rows of each error, then of each warning."""
    found = [("✗", "error", result) for result in errors(results)]
    found += [("!", "warning", result) for result in warnings(results)]
    name_cells = max((len(result.check) for _, _, result in found), default=0) + 2
    return [_wrapped(mark, _result_text(result, name_cells), role, width, name_cells) for mark, role, result in found]


def _result_text(result: CheckResult, name_cells: int) -> str:
    host = f"{result.host}: " if result.host else ""
    fix = f" → {result.fix}" if result.fix else ""
    return f"{result.check:<{name_cells}}{host}{result.what}{fix}"


def _wrapped(mark: str, text: str, role: str, width: int, indent: int = 0) -> list[Row]:
    """Return a text wrapped into rows; rows after the first are indented by ``indent`` cells."""
    name, text = printable(text)[:indent], printable(text)[indent:]
    first, *rest = wrap_text(text, width - 4 - indent)
    lines = [(f"  {mark} ", name + first), *(("    ", " " * indent + line) for line in rest)]
    return [fit_row([(before, role), (line, "bright")], width) for before, line in lines]


class PreflightSummary(Canvas):
    """Panel of the open recipe's preflight."""

    _results: Sequence[CheckResult] = ()
    _problem = ""
    _waiting = False
    """Whether a recipe is being checked for the first time."""

    def wait(self) -> None:
        """Show that the recipe is being checked, unless there are earlier results."""
        self._waiting = True
        self.redraw()

    def show(self, results: Sequence[CheckResult], problem: str) -> None:
        """Show the results of all checks, or the error of the recipe itself."""
        self._results, self._problem = results, problem
        self.redraw()

    def lines(self, width: int) -> int:
        """Return the number of lines in which all errors and warnings fit."""
        if self._problem:
            return 1 + len(_wrapped("✗", self._problem, "error", width))
        return 1 + sum(map(len, _blocks(self._results, width)))

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the results."""
        if not (self._waiting or self._results or self._problem):
            return [title_row(width, [("preflight", "title")])]
        return draw_preflight(self._results, self._problem, width, height)
