"""Step time by phase: a stacked bar per rank or group of ranks, all on one scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from gputrain_tui.console.widgets.chart_view import LABEL_CELLS
from gputrain_tui.console.widgets.drawing import (
    EIGHTHS,
    Row,
    centred_text,
    fit_rows,
    format_number,
    format_value,
    group_size,
    merge,
    row_cells,
    title_row,
)
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.state import RankView
from gputrain_tui.state.finding_text import by_urgency
from gputrain_tui.state.totals import PHASES

SHAPES = "▒█▓░▞·"
LEGENDS = (
    ("data", "forward", "backward", "sync", "optimizer", "other"),
    ("data", "fwd", "bwd", "sync", "opt", "other"),
    ("d", "f", "b", "s", "o", "…"),
)
"""Names of ``PHASES``, from the longest; ``other`` is the rest of a step, outside of all measured phases."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bar of one rank or group of ranks."""

    label: str
    phases: tuple[float, ...]
    """Milliseconds of each phase, in the order of ``PHASES``."""
    selected: bool = False
    flagged: bool = False

    @property
    def total_ms(self) -> float:
        return sum(self.phases)


def phases_of(view: RankView) -> tuple[float, ...] | None:
    """Return the milliseconds of each phase of a rank's mean step, by the phases' shares; None if not measured."""
    sums = view.sums
    step_ms = sums.mean_step_ms
    if step_ms is None or sums.share("other") is None:
        return None
    return tuple(step_ms * (sums.share(phase) or 0.0) for phase in PHASES)


def bars(views: Sequence[RankView], most: int, selected: int | None, flagged: Collection[int] = ()) -> list[Bar]:
    """Return at most ``most`` bars: one per rank, or else per group of equally many ranks.

    The selected and up to three flagged ranks have bars of their own above those of the groups.
    """
    measured = [(view, phases) for view in views if (phases := phases_of(view)) is not None]

    def bar(view: RankView, phases: tuple[float, ...]) -> Bar:
        return Bar(label=f"{view.rank}", phases=phases, selected=view.rank == selected, flagged=view.rank in flagged)

    if len(measured) <= most:
        return [bar(*each) for each in measured]
    alone = list(dict.fromkeys(rank for rank in (selected, *flagged) if rank is not None))
    most_alone = 1 + 3  # the selected one and flagged ones
    alone = alone[: min(most_alone, max(most // 2, 1))]
    chosen = sorted((bar(*each) for each in measured if each[0].rank in alone), key=lambda bar: not bar.selected)
    size = group_size(len(measured), most - len(chosen))
    groups = [measured[begin : begin + size] for begin in range(0, len(measured), size)]
    spans = [(group[0][0].rank, group[-1][0].rank) for group in groups]
    labels = [f"{first}–{last}" if last > first else f"{first}" for first, last in spans]
    if max(map(len, labels)) > LABEL_CELLS:
        labels = [f"{first}{'…' if last > first else ''}" for first, last in spans]
    return chosen + [
        Bar(label=label, phases=tuple(map(fmean, zip(*(phases for _, phases in group), strict=True))))
        for label, group in zip(labels, groups, strict=True)
    ]


def bar_lines(ranks: int, height: int) -> int:
    """Return the lines, at most ``height``, that the bars of ``ranks`` ranks can use, with title and a blank line."""
    most = height - 1
    count = ranks if ranks <= most else 1 + -(-ranks // group_size(ranks, most - 1))
    return min(count + 2, height)


def draw_bars(
    lines: Sequence[Bar],
    width: int,
    height: int,
    *,
    step_ms: float | None = None,
    span: str = "",
    symbols: bool = False,
) -> list[Row]:
    """Return the bars as ``height`` rows of ``width`` cells; ``step_ms``: mean duration of a step of the run."""
    left: Row = [("step", "title")]
    if not lines:
        empty = centred_text(width, height - 1, ["the phases of a step were not measured yet"])
        return fit_rows([title_row(width, left), *empty], width, height)
    left += [(" ", "base"), (format_value(step_ms), "bright"), (" ms", "dim")]
    legends = [_legend(names, symbols) for names in LEGENDS]
    if span and row_cells(left) + row_cells(legends[0]) + len(span) + 6 <= width:
        left.append((f"  {span}", "dim"))
    legend = next((legend for legend in legends if row_cells(left) + row_cells(legend) + 4 <= width), legends[-1])
    rows = [title_row(width, left, [legend])]
    cells = width - LABEL_CELLS - 2 - 8
    widest = max(line.total_ms for line in lines) or 1.0
    for line in lines[: height - 1]:
        sign, role = ("▲", "warning") if line.flagged else ("", "accent" if line.selected else "axis")
        bar = _bar(line.phases, cells, widest, symbols) if cells > 0 else []
        total = (format_number(line.total_ms, 1, 8), "bright" if line.selected else "dim")
        rows.append([((sign + line.label).rjust(LABEL_CELLS), role), ("  ", "base"), *bar, total])
    return fit_rows(rows, width, height)


def _legend(names: Sequence[str], symbols: bool) -> Row:
    row: Row = []
    for index, name in enumerate(names):
        sign = SHAPES[index] if symbols else "■"
        row += [(f"{' ' if index else ''}{sign}", f"phase:{PHASES[index]}"), (f" {name}", "dim")]
    return row


def _bar(phases: Sequence[float], cells: int, widest: float, symbols: bool) -> Row:
    """Return a stacked bar in eighths of a cell; a cell shared by two phases has the colours of both."""
    ends = [min(round(done / widest * cells * 8), cells * 8) for done in accumulate(phases)]
    pieces: Row = []
    index = 0
    for x in range(cells):
        begin = 8 * x
        while index < len(ends) and ends[index] <= begin:
            index += 1
        if index == len(ends):
            pieces.append((" ", "base"))
            continue
        name = PHASES[index]
        filled = min(ends[index] - begin, 8)
        if symbols:
            pieces.append((SHAPES[index], f"phase:{name}"))
        elif filled == 8:
            pieces.append(("█", f"phase:{name}"))
        else:
            following = next((i for i in range(index + 1, len(ends)) if ends[i] > ends[index]), None)
            role = f"phase:{name}" if following is None else f"phase:{name}:{PHASES[following]}"
            pieces.append((EIGHTHS[filled], role))
    return merge(pieces)


class StepBars(Panel):
    """Panel of the phases of the last steps, per rank."""

    def seen_version(self) -> object:
        return self.live.version

    def draw(self, width: int, height: int) -> list[Row]:
        state = self.live.state
        findings = sorted(state.findings.values(), key=by_urgency)
        flagged = [finding.rank for finding in findings if finding.rank is not None]
        views = [state.ranks[rank] for rank in sorted(state.ranks)]
        lines = bars(views, height - 1, self.selected_rank, flagged)
        step_ms, symbols = state.figures.step_ms, self.ramp.symbols
        return draw_bars(lines, width, height, step_ms=step_ms, span=state.span, symbols=symbols)
