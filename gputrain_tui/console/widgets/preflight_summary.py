"""Panel of the open recipe's preflight: a summary line, and the worst results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, fit_row, title_row, wrap_text
from gputrain_tui.preflight import CheckResult, errors, summary, warnings
from gputrain_tui.preflight.result import by_hosts
from gputrain_tui.tables import printable


def draw_preflight(
    results: Sequence[CheckResult], problem: str, width: int, height: int, *, waiting: bool = False
) -> list[Row]:
    """Return a summary and the worst results; or the ``problem`` of a recipe that could not be checked.

    ``waiting``: they are those before the last change.
    """
    title = ("preflight", "title")
    blocks = _blocks(results, problem, width)
    if waiting or not (results or problem):
        return [title_row(width, [title, ("  checking …", "dim")]), *chain(*blocks)][:height]
    if problem:
        return [title_row(width, [title, ("  ✗ the recipe has an error", "error")]), *chain(*blocks)][:height]
    stopping, doubtful = errors(results), warnings(results)
    sign, role = ("✗", "error") if stopping else ("!", "warning") if doubtful else ("✓", "good")
    verdict = f"  {sign} {'ready, ' if doubtful and not stopping else ''}{summary(results)}"
    shown = sum(end <= height - 1 for end in accumulate(map(len, blocks)))
    rights: list[Row] = [[(f"{len(results)} check{'s' * (len(results) != 1)}", "dim")]]
    if shown < len(blocks):
        rights.append([(f"{shown} of {len(blocks)} shown", "accent")])
    return [title_row(width, [title, (verdict, role)], rights), *chain(*blocks)][:height]


def _blocks(results: Sequence[CheckResult], problem: str, width: int) -> list[list[Row]]:
    """Return the rows of each error, then of each warning, as one for hosts with the same; of a problem those alone."""
    if problem:
        return [_wrapped("✗", problem, "error", width)]
    worst = [("✗", "error", result) for result in by_hosts(errors(results))]
    worst += [("!", "warning", result) for result in by_hosts(warnings(results))]
    name_cells = max((len(result.check) for _, _, result in worst), default=0) + 2
    blocks = []
    for sign, role, result in worst:
        host, fix = f"{result.host}: " if result.host else "", f" → {result.fix}" if result.fix else ""
        blocks.append(_wrapped(sign, f"{result.check:<{name_cells}}{host}{result.what}{fix}", role, width, name_cells))
    return blocks


def _wrapped(sign: str, text: str, role: str, width: int, indent: int = 0) -> list[Row]:
    """Return a text wrapped into rows; rows after the first are indented by ``indent`` cells."""
    name, text = printable(text)[:indent], printable(text)[indent:]
    first, *rest = wrap_text(text, width - 4 - indent)
    lines = [(f"  {sign} ", name + first), *(("    ", " " * indent + line) for line in rest)]
    return [fit_row([(before, role), (line, "bright")], width) for before, line in lines]


class PreflightSummary(Canvas):
    """Panel of the open recipe's preflight."""

    _results: Sequence[CheckResult] = ()
    _problem = ""
    _waiting = False

    def wait(self) -> None:
        self._waiting = True
        self.redraw()

    def show(self, results: Sequence[CheckResult], problem: str) -> None:
        self._results, self._problem, self._waiting = results, problem, False
        self.redraw()

    def lines(self, width: int) -> int:
        return 1 + sum(map(len, _blocks(self._results, self._problem, width)))

    def draw(self, width: int, height: int) -> list[Row]:
        if not (self._waiting or self._results or self._problem):
            return [title_row(width, [("preflight", "title")])]
        return draw_preflight(self._results, self._problem, width, height, waiting=self._waiting)
