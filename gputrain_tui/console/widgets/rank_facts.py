"""Panel of one rank's values, in columns of name and value."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import EMPTY, Row, fit_row, format_value, title_row
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.console.widgets.rank_columns import PHASES
from gputrain_tui.console.widgets.rank_table import GOING
from gputrain_tui.headless.number_text import loss_text, percent
from gputrain_tui.state import RankView, RunState
from gputrain_tui.tables import duration, printable, size

Fact = tuple[str, str, str]
"""Name, value, and the role of the value."""

NAME_CELLS = 15
VALUE_CELLS = 10
"""Cells of a name and of a value."""


def facts(state: RunState, rank: int, now: float, *, standing_still: bool = False, ended: str = "") -> list[Fact]:
    """Return names and values of a rank, the most important first; ``standing_still``: without its throughput.

    ``ended`` is the state of a rank without a recorded end of a run that is over.
    """
    view = state.ranks.get(rank)
    if view is None:
        return [("state", "no report yet", "dim")]
    last, sums, gpu, process = view.last, view.sums, view.gpu, view.process
    late = state.lateness().get(rank)
    age_s = None if view.time is None else max(0.0, now - view.time)
    found: list[Fact] = [
        ("state", ended if ended and view.display_state in GOING else _state(view), _state_role(state, view)),
        ("last report", f"{duration(age_s)} ago" if age_s is not None and state.ended is None else EMPTY, "bright"),
        ("step", f"{view.step:,}" if last else EMPTY, "bright"),
        ("loss", loss_text(view.loss), "title"),
        ("samples/s", EMPTY if standing_still else format_value(sums.samples_per_s), "bright"),
        ("samples", f"{view.totals.samples:,}" if last else EMPTY, "bright"),
        ("gradient norm", format_value(last.grad_norm if last else None), "bright"),
        ("own grad norm", format_value(last.local_grad_norm if last else None), "bright"),
        ("step ms", format_value(sums.mean_step_ms), "bright"),
        ("data ms", format_value(sums.mean_phase_ms("data")), "bright"),
        ("forward ms", format_value(sums.mean_phase_ms("forward")), "bright"),
        ("backward ms", format_value(sums.mean_phase_ms("backward")), "bright"),
        ("sync wait ms", format_value(sums.mean_exposed_ms), "bright"),
        ("optimizer ms", format_value(sums.mean_phase_ms("optimizer")), "bright"),
        ("other ms", format_value(sums.mean_phase_ms("other")), "bright"),
        ("late ms", format_value(late), "bright"),
        ("sync share", percent(sums.share("sync")), "bright"),
        ("memory", size(view.memory_bytes) or EMPTY, "bright"),
        ("peak memory", size(view.memory_peak_bytes) or EMPTY, "bright"),
    ]
    if gpu is not None:
        found += [
            ("GPU use", _with_unit(gpu.utilization_percent, "%"), "bright"),
            ("temperature", _with_unit(gpu.temperature_celsius, "°C"), "bright"),
            ("power", _with_unit(gpu.power_watts, "W"), "bright"),
            ("clock", _with_unit(gpu.sm_clock_mhz, "MHz"), "bright"),
            ("throttled by", ", ".join(gpu.throttle_reasons) or "nothing",
             "warning" if gpu.throttle_reasons else "bright"),
        ]  # fmt: skip
    if process is not None:
        found += [
            ("CPU use", _with_unit(process.cpu_percent, "%"), "bright"),
            ("waits for CPU", _with_unit(process.wait_percent, "%"), "bright"),
        ]
    return found


def _state(view: RankView) -> str:
    return PHASES[view.phase] if view.phase is not None else view.display_state or "not started"


def _state_role(state: RunState, view: RankView) -> str:
    if view.display_state == "failed":
        return "error"
    return "victim" if view.outcome is not None and state.root_cause is not None else "bright"


def placement(view: RankView) -> str:
    """Return host, device, local rank and process id of a rank as text."""
    parts = [
        printable(view.host or ""),
        printable(view.device or ""),
        f"local rank {view.local_rank}" if view.local_rank is not None else "",
        f"pid {view.pid}" if view.pid is not None else "",
    ]
    return "  ".join(filter(None, parts))


def _with_unit(value: float | None, unit: str) -> str:
    return EMPTY if value is None else f"{value:.0f}{'' if unit == '%' else ' '}{unit}"


def draw_facts(
    rank: int, found: list[Fact], width: int, height: int, *, where: str = "", span: str = "", message: str = ""
) -> list[Row]:
    """Return the values as ``height`` rows of ``width`` cells, filled column by column."""
    rights: list[Row] = [[(printable(message), "warning")]] if message else []
    rights += [[(f"means of the {span}", "dim")]] if span else []
    rows: list[Row] = [title_row(width, [(f"rank {rank}", "title"), (f"  {where}", "dim")], rights)]
    columns = max(min(width // (NAME_CELLS + VALUE_CELLS), 6), 1)
    lines = max(min(height - 1, -(-len(found) // columns)), 1)
    column_cells = width // columns
    for y in range(lines):
        row: Row = []
        for x in range(columns):
            index = x * lines + y
            if index < len(found):
                name, value, role = found[index]
                room = max(column_cells - NAME_CELLS - 2, 1)
                text = value if len(value) <= room else value[: room - 1] + "…"
                row += [(f" {name.ljust(NAME_CELLS - 1)}", "dim"), (text.ljust(room), role), ("  ", "base")]
        rows.append(row)
    return [fit_row(row, width) for row in [*rows, *([[]] * height)][:height]]


def facts_height(width: int, count: int) -> int:
    """Return the lines of a panel with ``count`` values."""
    return 1 + -(-count // max(min(width // (NAME_CELLS + VALUE_CELLS), 6), 1))


class RankFacts(ClockPanel):
    """Panel of the selected rank's values."""

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the selected rank's values, with its failure or message in the title."""
        rank = self.selected_rank or 0
        view = self.live.state.ranks.get(rank)
        failure = view.failure.message if view is not None and view.failure is not None else None
        message = failure or (view.message or "" if view is not None else "")
        where = placement(view) if view is not None else ""
        still = self.live.standstill
        found = facts(
            self.live.state,
            rank,
            self.live.now(),
            standing_still=still is not None and still.is_long,
            ended=self.live.end_text,
        )
        return draw_facts(rank, found, width, height, where=where, span=self.live.state.span, message=message)
