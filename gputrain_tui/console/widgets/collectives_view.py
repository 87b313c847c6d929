"""Panel of one rank's collectives: a table of its process groups, and the single calls of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.widgets.canvas import Copyable
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, format_value, pad, title_row
from gputrain_tui.console.widgets.panel import ScrolledText
from gputrain_tui.headless.number_text import percent
from gputrain_tui.state import RankView
from gputrain_tui.state.figures import group_figures, members_text, operations_text
from gputrain_tui.state.process_groups import CALLS_SPAN
from gputrain_tui.tables import printable, size
from trainer.contract.record import Step

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

NONE_TEXT = "no collectives besides DDP's gradients were measured"
NUMBER_CELLS = 10


def collective_rows(view: RankView) -> Iterator[Row]:
    """Yield the table of a rank's groups, and below it single calls: of its slowest step and of the newest one."""
    figures = group_figures(view)
    if not figures:
        return
    name_cells = max(len("group"), *(len(each.group) for each in figures)) + 2
    heads = _numbers("calls", "bytes", "wait ms", "share")
    yield [(f" {'group':<{name_cells}}{'ranks':<14}{heads}  operations", "dim")]
    for each in figures:
        figures_of = format_value(each.calls), size(int(each.bytes)), format_value(each.exposed_ms), percent(each.share)
        yield [
            (f" {printable(each.group):<{name_cells}}", "accent"),
            (pad(members_text(each.ranks) or EMPTY, 14), "dim"),
            (_numbers(*figures_of), "bright"),
            (f"  {printable(operations_text(each.operations, each.operation_exposed_ms))}", "dim"),
        ]
    if not view.groups.detailed:
        return
    newest, slowest = view.groups.detailed[-1], view.groups.slowest
    if slowest is not None and slowest is not newest:
        yield from _call_rows(slowest, f", the slowest recorded of the last {CALLS_SPAN:,}")
    yield from _call_rows(newest, "")


def _call_rows(step: Step, what: str) -> Iterator[Row]:
    yield []
    at = f"step {step.step:,}" if step.steps == 1 else f"a step up to {step.step:,}"
    yield [(f" calls of {at}", "title"), (f" {format_value(step.step_ms)} ms{what}", "dim")]
    yield [(_numbers("at ms", "took ms", "wait ms", "bytes"), "dim")]
    for call in step.calls or ():
        times = map(format_value, (call.start_ms, call.total_ms, call.exposed_ms))
        yield [
            (_numbers(*times, size(call.bytes)), "bright"),
            (f"  {printable(call.operation)}", "accent"),
            (f" of {printable(call.group)}", "dim"),
        ]


def _numbers(*values: str) -> str:
    return "".join(f"{value:>{NUMBER_CELLS}}" for value in values)


class CollectivesView(ScrolledText):
    """Panel of the collectives of the selected rank."""

    PLACE = "text"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("text")]

    def __init__(self, live: LiveRun, rank: int, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live = live
        self._rank = rank
        self._drawn: object = None

    def show_rank(self, rank: int) -> None:
        self._rank = rank
        self.redraw()

    def tick(self) -> None:
        """Redraw the panel if the run has changed."""
        if self._live.version != self._drawn:
            self._drawn = self._live.version
            self.redraw()

    def _view(self) -> RankView | None:
        return self._live.state.ranks.get(self._rank)

    def copyable(self) -> Copyable | None:
        view = self._view()
        rows = [] if view is None else list(collective_rows(view))
        lines = ["".join(text for text, _ in row).rstrip() for row in rows]
        return Copyable("\n".join(lines), "the collectives") if lines else None

    def draw(self, width: int, height: int) -> list[Row]:
        view = self._view()
        rows = [] if view is None else list(collective_rows(view))
        if view is None or not rows:
            return [title_row(width, [("collectives", "title")]), *centred_text(width, height - 1, [NONE_TEXT])]
        steps = view.groups.recent_steps
        span = [[(f"means of the last {steps:,} step{'s' * (steps != 1)}", "dim")]]
        return [title_row(width, [("collectives", "title")], span), *self.in_view(rows, height - 1)]
