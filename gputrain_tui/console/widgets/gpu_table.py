"""Table of the GPUs of all hosts, with load, users and the choice for the next launch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType

from gputrain_tui.console.host_choice import GpuRank, Host
from gputrain_tui.console.widgets.canvas import Canvas, Listing
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    Row,
    bar,
    centred_text,
    fit_row,
    format_gib,
    format_integer,
    row_cells,
    title_row,
)
from gputrain_tui.hosts.inventory import Gpu, is_free, why_busy
from gputrain_tui.tables import duration, printable

HOT_CELSIUS = 85
"""Temperature in °C from which it is shown as a warning: GPUs begin to throttle a little above."""
STALE_S = 30.0
"""Age of an inventory, seconds, from which it is shown as a warning."""


@dataclass(frozen=True)
class GpuColumn:
    """One column of the table."""

    title: str
    width: int
    keep: int
    """Order of importance: a narrow table drops the columns with the greatest numbers."""
    cell: Callable[[Gpu], Row]
    right: bool = True


def _percent(gpu: Gpu) -> Row:
    busy = gpu.utilization_percent is not None and gpu.utilization_percent >= 1
    return [(format_integer(gpu.utilization_percent), "bright" if busy else "dim")]


def _temperature(gpu: Gpu) -> Row:
    celsius = gpu.temperature_celsius
    return [(format_integer(celsius), "dim" if celsius is None or celsius < HOT_CELSIUS else "warning")]


def _clock(gpu: Gpu) -> Row:
    return [(format_integer(gpu.sm_clock_mhz), "warning" if gpu.throttle_reasons else "dim")]


def _memory_share(gpu: Gpu) -> float | None:
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return gpu.memory_used_bytes / gpu.memory_total_bytes


COLUMNS = (
    GpuColumn("name", 14, 2, lambda gpu: [(printable(gpu.name).removeprefix("NVIDIA "), "bright")], right=False),
    GpuColumn("memory", 10, 5, lambda gpu: bar(_memory_share(gpu), 10), right=False),
    GpuColumn("GiB", 6, 1, lambda gpu: [(format_gib(gpu.memory_used_bytes), "bright")]),
    GpuColumn("of", 6, 6, lambda gpu: [(format_gib(gpu.memory_total_bytes), "dim")]),
    GpuColumn("util %", 6, 1, _percent),
    GpuColumn("°C", 3, 3, _temperature),
    GpuColumn("W", 5, 4, lambda gpu: [(format_integer(gpu.power_watts), "dim")]),
    GpuColumn("max W", 5, 8, lambda gpu: [(format_integer(gpu.power_limit_watts), "dim")]),
    GpuColumn("MHz", 5, 7, _clock),
    GpuColumn("max MHz", 7, 9, lambda gpu: [(format_integer(gpu.max_sm_clock_mhz), "dim")]),
    GpuColumn("PCI", 16, 10, lambda gpu: [(gpu.pci_bus_id, "dim")], right=False),
)
STATE_CELLS = 26
"""Fewest cells of the last column: throttle reasons and users."""
THROTTLE_TEXTS = {
    "application_clocks": "clocks set",
    "power_cap": "power",
    "hardware_slowdown": "hardware",
    "sync_boost": "sync boost",
    "thermal_software": "heat",
    "thermal_hardware": "heat",
    "power_brake": "power brake",
    "display_clocks": "display",
}
"""Short texts of NVML's throttle reasons."""
MARK_CELLS = 8
"""Cells of the mark and the GPU's index, before the columns."""


def columns_for(width: int) -> list[GpuColumn]:
    """Return the most important columns, as many as fit."""
    kept = list(COLUMNS)
    while kept and MARK_CELLS + sum(column.width + 2 for column in kept) + STATE_CELLS > width:
        kept.remove(max(kept, key=lambda column: column.keep))
    return kept


def draw_gpu(gpu: Gpu, width: int, *, chosen: bool, owner: GpuRank | None) -> Row:
    """Return the line of one GPU."""
    free = is_free(gpu)
    mark = ("◉", "accent") if chosen else ("○", "good") if free else (" ", "dim")
    row: Row = [(" ", "base"), mark, (f"{gpu.index:>4}", "bright"), ("  ", "base")]
    for column in columns_for(width):
        cell = fit_row(column.cell(gpu), column.width) if not column.right else column.cell(gpu)
        pad = " " * max(column.width - row_cells(cell), 0)
        row += [(pad, "base"), *cell, ("  ", "base")]
    return fit_row([*row, *_state(gpu, free, owner)], width)


def _state(gpu: Gpu, free: bool, owner: GpuRank | None) -> Row:
    row: Row = []
    if gpu.throttle_reasons:
        why = dict.fromkeys(THROTTLE_TEXTS.get(reason, reason.replace("_", " ")) for reason in gpu.throttle_reasons)
        row.append((f"slowed: {', '.join(why)}  ", "warning"))
    if owner is not None:
        row += [(f"rank {owner.rank}", "accent"), (f" of {owner.run}", "dim")]
    elif free:
        row.append(("free", "good"))
    else:
        row.append((printable(why_busy(gpu)), "bright"))
    return row


def age(host: Host, now: float) -> tuple[str, str]:
    """Return the age of a host's inventory as text, and its role."""
    if host.inventory_at is None:
        return ("asking" if host.surveying or host.surveyed_at is None else "", "dim")
    old = max(now - host.inventory_at, 0.0)
    return ("now" if old < 3 else f"{duration(old)} ago", "warning" if old >= STALE_S else "dim")


def draw_host(host: Host, width: int, *, name_cells: int, chosen: int, now: float) -> Row:
    """Return the line of a host above its GPUs; ``chosen``: number of its GPUs chosen for the launch."""
    row: Row = [(f" {printable(host.display_name)[:name_cells]:<{name_cells}}  ", "title")]
    when, role = age(host, now)
    inventory = host.inventory
    if inventory is None:
        return fit_row([*row, (host.problem or "querying", "dim")], width)
    pieces: list[Row] = []
    if host.gpus:
        free = len(host.free)
        share = f"{free} of {len(host.gpus)} free"
        pieces.append([(share.ljust(13), "good" if free else "dim")])
    else:
        pieces.append([("no GPU".ljust(13), "dim")])
    if host.problem:
        pieces.append([(host.problem, "warning")])
    else:
        cores = inventory.cpus.usable
        if inventory.load is not None:
            load = inventory.load[0]
            pieces.append(
                [("load ", "dim"), *bar(load / max(cores, 1), 6), (f" {load:5.1f}", "bright"), (f"/{cores:<3}", "dim")]
            )
        memory = inventory.memory
        if memory.total_bytes and memory.available_bytes is not None:
            used = memory.total_bytes - memory.available_bytes
            total = format_gib(memory.total_bytes, 0)
            pieces.append(
                [
                    ("memory ", "dim"),
                    *bar(used / memory.total_bytes, 6),
                    (f" {format_gib(used, 0):>4}", "bright"),
                    (f"/{total} GiB".ljust(9), "dim"),
                ]
            )
        pieces += [[(text, "dim")] for text in _links(host)]
    tail: Row = [*([(f"{chosen} chosen  ", "accent")] if chosen else []), (when, role), (" ", "base")]
    for piece in pieces:
        if row_cells(row) + row_cells(piece) + row_cells(tail) + 2 > width and not host.problem:
            break
        row += [*piece, ("  ", "base")]
    row = fit_row(row, min(row_cells(row), max(width - row_cells(tail) - 1, 0)))
    return fit_row([*row, (" " * max(width - row_cells(row) - row_cells(tail), 0), "base"), *tail], width)


def _links(host: Host) -> list[str]:
    """Return the fastest network of a host and the version of its driver, as texts."""
    assert host.inventory is not None
    up = [network for network in host.inventory.networks if network.up and network.addresses]
    fast = max(up, key=lambda network: network.speed_mbits or 0, default=None)
    found = []
    if fast is not None:
        speed = f" {fast.speed_mbits / 1000:g} Gb/s" if fast.speed_mbits else ""
        found.append(f"{printable(fast.name)} {fast.addresses[0]}{speed}")
    if host.inventory.driver:
        found.append(f"driver {host.inventory.driver}")
    return found


class GpuTable(Listing):
    """List of the GPUs of every host; with several hosts, below a line for each."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "toggle_gpu", "Select", show=False)]

    hosts: Sequence[Host] = ()
    now = 0.0
    """Present time, monotonic seconds."""
    chosen: Set[tuple[str, int]] = frozenset()
    """Host and index of each GPU chosen for the launch."""
    _lines: Sequence[tuple[Host, Gpu | None]] = ()

    @property
    def several(self) -> bool:
        """Whether there is more than one host."""
        return len(self.hosts) > 1

    @property
    def host(self) -> Host | None:
        """The host under the cursor."""
        return self._at_cursor()[0]

    @property
    def gpu(self) -> Gpu | None:
        """The GPU under the cursor; None on the line of a host."""
        return self._at_cursor()[1]

    def _at_cursor(self) -> tuple[Host | None, Gpu | None]:
        if self._lines:
            return self._lines[min(self.cursor, len(self._lines) - 1)]
        return (self.hosts[0] if self.hosts else None), None

    def show(self, hosts: Sequence[Host], *, now: float) -> None:
        """Show hosts; the cursor stays on its GPU."""
        host, gpu = self._at_cursor()
        before = (host.name if host is not None else "", gpu.index if gpu is not None else None)
        self.hosts, self.now = hosts, now
        self._lines = [(host, gpu) for host in hosts for gpu in (*((None,) if self.several else ()), *host.gpus)]
        self.chosen &= {(host.name, gpu.index) for host in hosts for gpu in host.gpus}
        keys = [(host.name, gpu.index if gpu is not None else None) for host, gpu in self._lines]
        if before in keys:
            self.cursor = keys.index(before)
        self.redraw()

    def chosen_by_host(self) -> dict[str, tuple[int, ...]]:
        """Return indices of the chosen GPUs by host; without a choice, the GPU or host's free GPUs under the cursor."""
        chosen = self.chosen
        if not chosen:
            host, gpu = self._at_cursor()
            if host is not None:
                chosen = {(host.name, index) for index in ((gpu.index,) if gpu is not None else host.free)}
        by_host = {
            host.name: tuple(sorted(index for name, index in chosen if name == host.name)) for host in self.hosts
        }
        return {name: indices for name, indices in by_host.items() if indices}

    def action_toggle_gpu(self) -> None:
        """Choose the GPU under the cursor for the launch, or undo the choice; on a host's line all its free ones."""
        host, gpu = self._at_cursor()
        if host is None:
            return
        if gpu is not None:
            self.chosen ^= {(host.name, gpu.index)}
        else:
            free = {(host.name, index) for index in host.free}
            before = {entry for entry in self.chosen if entry[0] == host.name}
            self.chosen = self.chosen - before if before == free else (self.chosen - before) | free
        self.redraw()

    def choose_free(self) -> None:
        """Choose all free GPUs, or none if they are chosen already."""
        free = {(host.name, index) for host in self.hosts for index in host.free}
        self.chosen = set() if self.chosen == free else free
        self.redraw()

    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def head(self, width: int) -> list[Row]:
        """Return the title and the names of the columns."""
        gpus = [gpu for host in self.hosts for gpu in host.gpus]
        free = sum(map(is_free, gpus))
        left: Row = [("GPUs", "title")]
        remarks: list[Row] = []
        if gpus:
            left.append((f"  {free} of {len(gpus)} free", "good" if free else "dim"))
            if self.several:
                left.append((f" on {len(self.hosts)} machines", "dim"))
            if self.chosen:
                remarks.append([(f"{len(self.chosen)} chosen", "accent"), (", enter launches on them", "dim")])
            else:
                remarks.append([("space chooses, f all free ones", "dim")])
        title = title_row(width, left, remarks)
        if not gpus:
            return [title]
        names = " " * 3 + "GPU  "
        for column in columns_for(width):
            names += (column.title.rjust(column.width) if column.right else column.title.ljust(column.width)) + "  "
        return [title, fit_row([(names + "used by", "dim")], width)]

    def row(self, index: int, width: int) -> Row:
        """Return the line of a GPU or of a host."""
        host, gpu = self._lines[index]
        if gpu is None:
            longest = max(len(each.display_name) for each in self.hosts)
            chosen = sum(name == host.name for name, _ in self.chosen)
            cells = min(longest, max(width // 4, 12))
            return draw_host(host, width, name_cells=cells, chosen=chosen, now=self.now)
        return draw_gpu(gpu, width, chosen=(host.name, gpu.index) in self.chosen, owner=host.run_ranks.get(gpu.index))

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the text for hosts without a GPU."""
        inventory = self.hosts[0].inventory if self.hosts else None
        if inventory is None:
            return centred_text(width, height, ["querying the driver"])
        note = inventory.note or "no GPU on this machine; CPU ranks work"
        lines = textwrap.wrap(note[:1].upper() + note[1:] + ".", max(width - 4, 1))
        cores = inventory.cpus.usable
        if height > len(lines) + 2:
            lines += ["", f"This machine trains on its CPU: cpu_ranks = {min(cores, 4)} in [[cluster.nodes]]."]
        return centred_text(width, height, lines)


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
