"""Step time by phase: a stacked bar per rank or group of ranks, all on one scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from gputrain_tui.console.widgets.curve_drawing import LABEL_CELLS
from gputrain_tui.console.widgets.drawing import (
    EIGHTHS,
    Row,
    centred_text,
    fit_row,
    format_number,
    format_value,
    group_size,
    merge,
    title_row,
)
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.state import RankView
from gputrain_tui.state.finding_text import by_urgency
from gputrain_tui.state.totals import PHASES

MOST_FLAGGED = 3
"""Most ranks with a finding that get a bar of their own beside bars of groups."""
SHAPES = "▒█▓░▞·"
"""Symbols of the phases, for terminals without colours."""
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
    """Whether the rank has a standing finding."""

    @property
    def total_ms(self) -> float:
        """Duration of the step, ms."""
        return sum(self.phases)


def phases_of(view: RankView) -> tuple[float, ...] | None:
    """Return the milliseconds of each phase of a rank's mean step, by the phases' shares; None if not measured."""
    sums = view.sums
    step_ms = sums.mean_step_ms
    if step_ms is None or sums.share("data") is None:
        return None
    return tuple(step_ms * (sums.share(phase) or 0.0) for phase in PHASES)


def bars(views: Sequence[RankView], most: int, selected: int | None, flagged: Collection[int] = ()) -> list[Bar]:
    """Return at most ``most`` bars: one per rank, or else per group of equally many ranks.

    The selected and up to ``MOST_FLAGGED`` flagged ranks have bars of their own above those of the groups.
    """
    found = [(view, phases) for view in views if (phases := phases_of(view)) is not None]

    def bar(view: RankView, phases: tuple[float, ...]) -> Bar:
        return Bar(label=f"{view.rank}", phases=phases, selected=view.rank == selected, flagged=view.rank in flagged)

    if len(found) <= most:
        return [bar(*each) for each in found]
    alone = [rank for rank in (selected, *flagged) if rank is not None]
    alone = list(dict.fromkeys(alone))[: min(1 + MOST_FLAGGED, max(most // 2, 1))]
    chosen = sorted((bar(*each) for each in found if each[0].rank in alone), key=lambda bar: not bar.selected)
    size = group_size(len(found), most - len(chosen))
    groups = [found[begin : begin + size] for begin in range(0, len(found), size)]
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
        head = title_row(width, left)
        return [fit_row(head, width), *centred_text(width, height - 1, ["the phases of a step were not measured yet"])]
    left += [(" ", "base"), (format_value(step_ms), "bright"), (" ms", "dim")]
    if span and sum(len(text) for text, _ in (*left, *_legend(LEGENDS[0], symbols))) + len(span) + 6 <= width:
        left.append((f"  {span}", "dim"))
    legend: Row = []
    for names in LEGENDS:
        legend = _legend(names, symbols)
        if sum(len(text) for text, _ in [*left, *legend]) + 4 <= width:
            break
    rows = [fit_row(title_row(width, left, [legend]), width)]
    cells = width - LABEL_CELLS - 2 - 8
    widest = max(line.total_ms for line in lines) or 1.0
    for line in lines[: height - 1]:
        mark, role = ("▲", "warning") if line.flagged else ("", "accent" if line.selected else "axis")
        row: Row = [((mark + line.label).rjust(LABEL_CELLS), role), ("  ", "base")]
        if cells > 0:
            row += _bar(line.phases, cells, widest, symbols)
        row.append((format_number(line.total_ms, 1, 8), "bright" if line.selected else "dim"))
        rows.append(fit_row(row, width))
    return rows + [fit_row([], width) for _ in range(height - len(rows))]


def _legend(names: Sequence[str], symbols: bool) -> Row:
    row: Row = []
    for index, name in enumerate(names):
        mark = SHAPES[index] if symbols else "■"
        row += [(f"{' ' if index else ''}{mark}", f"phase:{PHASES[index]}"), (f" {name}", "dim")]
    return row


def _bar(phases: Sequence[float], cells: int, widest: float, symbols: bool) -> Row:
    """Return a stacked bar in eighths of a cell; a cell shared by two phases has the colours of both."""
    ends, done = [], 0.0
    for phase in phases:
        done += phase
        ends.append(min(round(done / widest * cells * 8), cells * 8))
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
        """Return a value that changes with every event."""
        return self.live.version

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the bars."""
        state = self.live.state
        flagged = [found.rank for found in sorted(state.findings.values(), key=by_urgency) if found.rank is not None]
        views = [state.ranks[rank] for rank in sorted(state.ranks)]
        lines = bars(views, height - 1, self.selected_rank, flagged)
        return draw_bars(
            lines, width, height, step_ms=state.figures.step_ms, span=state.span, symbols=self.ramp.symbols
        )
