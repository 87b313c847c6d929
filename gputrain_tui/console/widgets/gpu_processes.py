"""Panel of the processes on a GPU."""

from __future__ import annotations

from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, fit_row, title_row
from gputrain_tui.console.widgets.gauges import format_gib
from gputrain_tui.hosts.inventory import Gpu
from gputrain_tui.tables import printable


def draw_processes(gpu: Gpu, width: int, height: int, *, of: str = "") -> list[Row]:
    """Return the processes on a GPU as rows; ``of``: name of its host for the title."""
    found = gpu.processes
    left: Row = [(f"processes on GPU {gpu.index}{f' of {printable(of)}' if of else ''}", "title")]
    rows: list[Row] = [title_row(width, left, [[(printable(gpu.uuid), "dim")]])]
    if found is None:
        return rows + centred_text(width, height - 1, ["not reported by the driver"])
    if not found:
        return rows + centred_text(width, height - 1, ["no process"])
    rows.append([(f"{'pid':>8}  {'user':<12}{'GiB':>7}  {'kind':<10}process", "dim")])
    for process in found:
        memory = format_gib(process.memory_bytes)
        rows.append(
            [
                (f"{process.pid:>8}  ", "dim"),
                (f"{printable(process.user or EMPTY)[:11]:<12}", "bright"),
                (f"{memory:>7}  ", "bright"),
                (f"{process.kind:<10}", "dim"),
                (printable(process.name or EMPTY), "bright"),
            ]
        )
    return [fit_row(row, width) for row in rows[:height]]


class ProcessList(Canvas):
    """Panel of the processes on the GPU under the cursor."""

    gpu: Gpu | None = None
    of = ""
    """Name of the GPU's host; empty if there is only one host."""

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the processes of the GPU."""
        return [] if self.gpu is None else draw_processes(self.gpu, width, height, of=self.of)
