"""Preflight of the open recipe: a summary line, and the worst results."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, fit_row, title_row
from gputrain_tui.preflight import CheckResult, errors, summary, warnings
from gputrain_tui.tables import printable


def draw_preflight(results: Sequence[CheckResult], problem: str, width: int, height: int) -> list[Row]:
    """Return a summary, then the worst results; or the ``problem`` of a recipe that could not be checked."""
    title = ("preflight", "title")
    if problem:
        rows = [title_row(width, [title, ("  ✗ the recipe is not right yet", "error")])]
        return [*rows, _line("✗", problem, "error", width)][:height]
    if not results:
        return [title_row(width, [title, ("  is looked at …", "dim")])]
    stopping, doubtful = errors(results), warnings(results)
    state = ("✗", "error") if stopping else ("!", "warning") if doubtful else ("✓", "good")
    verdict = f"  {state[0]} {'ready, ' if doubtful and not stopping else ''}{summary(results)}"
    wide = max((len(result.check) for result in (*stopping, *doubtful)), default=0)
    lines = [_line("✗", _result_text(result, wide), "error", width) for result in stopping]
    lines += [_line("!", _result_text(result, wide), "warning", width) for result in doubtful]
    remarks: list[Row] = [[(f"{len(results)} check{'s' * (len(results) != 1)}", "dim")]]
    if len(lines) > height - 1:
        remarks.insert(0, [(f"{height - 1} of {len(lines)} shown", "accent")])
    return [title_row(width, [title, (verdict, state[1])], remarks[::-1]), *lines][:height]


def _result_text(result: CheckResult, wide: int) -> str:
    host = f"{result.host}: " if result.host else ""
    fix = f" → {result.fix}" if result.fix else ""
    return f"{result.check:<{wide}}  {host}{result.what}{fix}"


def _line(mark: str, text: str, role: str, width: int) -> Row:
    text = printable(text)
    left = width - 4
    return fit_row([(f"  {mark} ", role), (text if len(text) <= left else f"{text[: left - 1]}…", "bright")], width)


class PreflightSummary(Canvas):
    """The preflight of the open recipe."""

    most = 2
    """Lines under the headline."""
    _results: Sequence[CheckResult] = ()
    _problem = ""

    def show(self, results: Sequence[CheckResult], problem: str) -> None:
        """Show the results of all checks, or the problem of the recipe itself."""
        self._results, self._problem = results, problem
        lines = 1 if problem else len(errors(results)) + len(warnings(results))
        self.styles.height = 1 + min(lines, self.most)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the results."""
        return draw_preflight(self._results, self._problem, width, height)
