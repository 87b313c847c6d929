"""Panel of one rank's values, in columns of name and value."""

from __future__ import annotations

from gputrain_tui.console.widgets.drawing import EMPTY, Row, fit_rows, format_value, pad, title_row
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.console.widgets.rank_columns import GOING, PHASES
from gputrain_tui.headless.number_text import loss_text, percent
from gputrain_tui.state import RunState
from gputrain_tui.tables import duration, printable, size

Fact = tuple[str, str, str]
"""Name, value, and the role of the value."""

NAME_CELLS = 15
VALUE_CELLS = 10


def facts(state: RunState, rank: int, now: float, *, standing_still: bool = False, ended: str = "") -> list[Fact]:
    """Return names and values of a rank, the most important first; ``standing_still``: without its throughput.

    ``ended`` is the state of a rank without a recorded end of a run that is over.
    """
    view = state.ranks.get(rank)
    if view is None:
        return [("state", "no report yet", "dim")]
    last, sums, gpu, process = view.last, view.sums, view.gpu, view.process
    status = PHASES[view.phase] if view.phase is not None else view.display_state or "not started"
    status = ended if ended and view.display_state in GOING else status
    consequence = view.outcome is not None and state.root_cause is not None
    status_role = "error" if view.display_state == "failed" else "victim" if consequence else "bright"
    reported = EMPTY
    if view.time is not None and state.ended is None:
        reported = f"{duration(max(0.0, now - view.time))} ago"
    counts_samples = view.totals.counts_samples
    rate = sums.samples_per_s if counts_samples else sums.steps_per_s
    rates = {"samples/s" if counts_samples or not last else "steps/s": EMPTY if standing_still else format_value(rate)}
    if counts_samples:
        rates["samples"] = f"{view.totals.samples:,}"
    share = {} if view.share is None else {"share": f"{view.share:,}"}
    if view.fit is not None:
        share |= {"fixed ms": format_value(view.fit.fixed_ms), "ms per unit": format_value(view.fit.per_sample_ms)}
    figures = {
        "last report": reported,
        "step": f"{view.step:,}" if last else EMPTY,
        "loss": loss_text(view.loss),
        **rates,
        **share,
        "gradient norm": format_value(last.grad_norm if last else None),
        "own grad norm": format_value(view.own_norm.local_grad_norm if view.own_norm else None),
        **({"own norm step": f"{view.own_norm.step:,}"} if view.own_norm else {}),
        "step ms": format_value(sums.mean_step_ms),
        "data ms": format_value(sums.mean_phase_ms("data")),
        "forward ms": format_value(sums.mean_phase_ms("forward")),
        "backward ms": format_value(sums.mean_phase_ms("backward")),
        "sync wait ms": format_value(sums.mean_exposed_ms),
        "optimizer ms": format_value(sums.mean_phase_ms("optimizer")),
        "other ms": format_value(sums.mean_phase_ms("other")),
        "late ms": format_value(state.lateness().get(rank)),
        "sync share": percent(sums.share("sync")),
        "memory": size(view.memory_bytes) or EMPTY,
        "peak memory": size(view.memory_peak_bytes) or EMPTY,
    }
    if gpu is not None:
        figures["GPU use"] = _with_unit(gpu.utilization_percent, "%")
        figures["temperature"] = _with_unit(gpu.temperature_celsius, " °C")
        figures["power"] = _with_unit(gpu.power_watts, " W")
        figures["clock"] = _with_unit(gpu.sm_clock_mhz, " MHz")
        figures["throttled by"] = ", ".join(gpu.throttle_reasons) or "nothing"
    if process is not None:
        figures["CPU use"] = _with_unit(process.cpu_percent, "%")
        figures["waits for CPU"] = _with_unit(process.wait_percent, "%")
    roles = {"loss": "title", "throttled by": "warning" if gpu is not None and gpu.throttle_reasons else "bright"}
    shown = [(name, value, roles.get(name, "bright")) for name, value in figures.items()]
    return [("state", status, status_role), *shown]


def _with_unit(value: float | None, unit: str) -> str:
    return EMPTY if value is None else f"{value:.0f}{unit}"


def _columns(width: int) -> int:
    return max(min(width // (NAME_CELLS + VALUE_CELLS), 6), 1)


def facts_height(width: int, count: int) -> int:
    """Return the lines of a panel with ``count`` values."""
    return 1 + -(-count // _columns(width))


class RankFacts(ClockPanel):
    """Panel of the selected rank's values, with its host, device and failure or message in the title."""

    def draw(self, width: int, height: int) -> list[Row]:
        rank, state = self.selected_rank or 0, self.live.state
        view = state.ranks.get(rank)
        where, rights = "", []
        if view is not None:
            local_rank = f"local rank {view.local_rank}" if view.local_rank is not None else ""
            pid = f"pid {view.pid}" if view.pid is not None else ""
            where = "  ".join(filter(None, (printable(view.host or ""), printable(view.device or ""), local_rank, pid)))
            message = view.failure.message if view.failure is not None else view.message
            rights = [[(printable(message), "warning")]] if message else []
        rights += [[(f"means of the {state.span}", "dim")]] if state.span else []
        rows: list[Row] = [title_row(width, [(f"rank {rank}", "title"), (f"  {where}", "dim")], rights)]
        shown = facts(state, rank, self.live.now(), standing_still=self.stands_still, ended=self.live.end_text)
        columns = _columns(width)
        lines = max(min(height - 1, -(-len(shown) // columns)), 1)
        value_cells = max(width // columns - NAME_CELLS - 2, 1)
        for y in range(lines):
            row: Row = []
            for name, value, role in shown[y : columns * lines : lines]:
                row += [(f" {name:<{NAME_CELLS - 1}}", "dim"), (pad(value, value_cells), role), ("  ", "base")]
            rows.append(row)
        return fit_rows(rows, width, height)
