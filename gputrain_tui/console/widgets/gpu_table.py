"""A machine and its GPUs: what they are, how busy, who uses them, and which are chosen for the next launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from gputrain_tui.console.widgets.canvas import Canvas, Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, cut, headline, length, message
from gputrain_tui.inventory import Gpu, Inventory, Network, is_free, why_busy
from gputrain_tui.tables import duration, printable

HOT_CELSIUS = 85
"""From here on a temperature needs a look: GPUs begin to slow down a little above."""
FULL = 0.9
"""From this share on a bar is drawn as nearly full."""
GIB = 1 << 30
LABEL = 9


@dataclass(frozen=True, kw_only=True)
class Ours:
    """A rank of ours on a GPU."""

    run: str
    rank: int


def bar(share: float | None, wide: int) -> Row:
    """Return a bar with half a cell's precision on a faint line."""
    if share is None:
        return [(EMPTY.center(wide), "dim")]
    full, half = divmod(round(min(max(share, 0.0), 1.0) * wide * 2), 2)
    text = "━" * full + "╸" * half
    return [(text, "warning" if share >= FULL else "bar"), ("─" * (wide - len(text)), "rule")]


def gib(value: int | None, digits: int = 1) -> str:
    """Return bytes in GiB."""
    return EMPTY if value is None else f"{value / GIB:.{digits}f}"


def whole(value: float | None) -> str:
    """Return a number without decimals."""
    return EMPTY if value is None else f"{value:.0f}"


# The machine


def draw_machine(inventory: Inventory, width: int, height: int) -> list[Row]:
    """Return host, cores, memory, network and driver, as many lines as there is room for."""
    cpus, memory = inventory.cpus, inventory.memory
    up = f"up {duration(inventory.uptime_s)}" if inventory.uptime_s is not None else ""
    head = headline(
        width,
        [(printable(inventory.host), "title"), ("  this machine", "dim")],
        [[(text, "dim")] for text in (printable(inventory.system), up) if text],
    )
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    usable = f", {cpus.usable} usable here" if cpus.usable < cpus.logical else ""
    lines: list[Row] = [
        [("cpu".ljust(LABEL), "dim"), (cores + usable, "bright"), (f"  {printable(cpus.model)}", "dim")]
    ]
    wide = min(max(width // 4, 10), 40)
    if inventory.load is not None:
        share = inventory.load[0] / max(cpus.usable, 1)
        text = "  ".join(f"{value:5.2f}" for value in inventory.load)
        lines.append(
            [("load".ljust(LABEL), "dim"), *bar(share, wide), (f"  {text}", "bright"), ("  1, 5, 15 min", "dim")]
        )
    if memory.total_bytes is not None and memory.available_bytes is not None:
        used = memory.total_bytes - memory.available_bytes
        text = f"{gib(used)} of {gib(memory.total_bytes)} GiB"
        lines.append(
            [
                ("memory".ljust(LABEL), "dim"),
                *bar(used / memory.total_bytes, wide),
                (f"  {text}", "bright"),
                (f"  {gib(memory.available_bytes)} available", "dim"),
            ]
        )
    networks = [network for network in inventory.networks if network.addresses and network.up]
    if networks:
        lines.append([("network".ljust(LABEL), "dim"), *_networks(networks)])
    if inventory.driver:
        cuda = f"  CUDA up to {inventory.cuda}" if inventory.cuda else ""
        lines.append([("driver".ljust(LABEL), "dim"), (inventory.driver, "bright"), (cuda, "dim")])
    return [cut(row, width) for row in [head, *lines][:height]]


def _networks(networks: Collection[Network]) -> Row:
    row: Row = []
    for network in networks:
        speed = f" {network.speed_mbits / 1000:g} Gb/s" if network.speed_mbits else ""
        addresses = ", ".join(network.addresses[:2])
        row += [("  " if row else "", "base"), (printable(network.name), "bright"), (f" {addresses}{speed}", "dim")]
    return row


class Machine(Canvas):
    """This machine."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.inventory: Inventory | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the machine, or that it is being looked at."""
        if self.inventory is None:
            return [headline(width, [("this machine", "title"), ("  being looked at", "dim")])]
        return draw_machine(self.inventory, width, height)


# The GPUs


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    title: str
    wide: int
    keep: int
    """When there is little room, columns with a greater number go first."""
    cell: Callable[[Gpu], Row]
    right: bool = True


def _percent(gpu: Gpu) -> Row:
    busy = gpu.utilization_percent is not None and gpu.utilization_percent >= 1
    return [(whole(gpu.utilization_percent), "bright" if busy else "dim")]


def _temperature(gpu: Gpu) -> Row:
    celsius = gpu.temperature_celsius
    return [(whole(celsius), "dim" if celsius is None or celsius < HOT_CELSIUS else "warning")]


def _clock(gpu: Gpu) -> Row:
    return [(whole(gpu.sm_clock_mhz), "warning" if gpu.throttle_reasons else "dim")]


def _memory_share(gpu: Gpu) -> float | None:
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return gpu.memory_used_bytes / gpu.memory_total_bytes


COLUMNS = (
    Column("name", 14, 2, lambda gpu: [(printable(gpu.name).removeprefix("NVIDIA "), "bright")], right=False),
    Column("memory", 10, 5, lambda gpu: bar(_memory_share(gpu), 10), right=False),
    Column("GiB", 6, 1, lambda gpu: [(gib(gpu.memory_used_bytes), "bright")]),
    Column("of", 6, 6, lambda gpu: [(gib(gpu.memory_total_bytes), "dim")]),
    Column("util %", 6, 1, _percent),
    Column("°C", 3, 3, _temperature),
    Column("W", 5, 4, lambda gpu: [(whole(gpu.power_watts), "dim")]),
    Column("max W", 5, 8, lambda gpu: [(whole(gpu.power_limit_watts), "dim")]),
    Column("MHz", 5, 7, _clock),
    Column("max MHz", 7, 9, lambda gpu: [(whole(gpu.max_sm_clock_mhz), "dim")]),
    Column("PCI", 16, 10, lambda gpu: [(gpu.pci_bus_id, "dim")], right=False),
)
STATE_CELLS = 26
"""What is left at least for why a GPU is slowed and who uses it."""
WHY_SLOW = {
    "application_clocks": "clocks set",
    "power_cap": "power",
    "hardware_slowdown": "hardware",
    "sync_boost": "sync boost",
    "thermal_software": "heat",
    "thermal_hardware": "heat",
    "power_brake": "power brake",
    "display_clocks": "display",
}
"""Reasons for a clock below its maximum, in a word."""
MARK_CELLS = 8


def columns_for(width: int) -> list[Column]:
    """Return the columns that fit, the most important ones."""
    kept = list(COLUMNS)
    while kept and MARK_CELLS + sum(column.wide + 2 for column in kept) + STATE_CELLS > width:
        kept.remove(max(kept, key=lambda column: column.keep))
    return kept


def draw_gpu(gpu: Gpu, width: int, *, chosen: bool, ours: Ours | None) -> Row:
    """Return the line of one GPU."""
    free = is_free(gpu)
    mark = ("◉", "accent") if chosen else ("○", "good") if free else (" ", "dim")
    row: Row = [(" ", "base"), mark, (f"{gpu.index:>4}", "bright"), ("  ", "base")]
    for column in columns_for(width):
        cell = cut(column.cell(gpu), column.wide) if not column.right else column.cell(gpu)
        pad = " " * max(column.wide - length(cell), 0)
        row += [(pad, "base"), *cell, ("  ", "base")]
    return cut([*row, *_state(gpu, free, ours)], width)


def _state(gpu: Gpu, free: bool, ours: Ours | None) -> Row:
    row: Row = []
    if gpu.throttle_reasons:
        why = dict.fromkeys(WHY_SLOW.get(reason, reason.replace("_", " ")) for reason in gpu.throttle_reasons)
        row.append((f"slowed: {', '.join(why)}  ", "warning"))
    if ours is not None:
        row += [(f"rank {ours.rank}", "accent"), (f" of {ours.run}", "dim")]
    elif free:
        row.append(("free", "good"))
    else:
        row.append((printable(why_busy(gpu)), "bright"))
    return row


class GpuTable(Listing):
    """The GPUs of this machine."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "toggle_gpu", "Select", show=False)]

    class Selected(Message):
        """Other GPUs are chosen."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.inventory: Inventory | None = None
        self.ours: Mapping[int, Ours] = {}
        """By index of the GPU."""
        self.chosen: set[int] = set()
        """Indices."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs in PCI order."""
        return self.inventory.gpus if self.inventory is not None else ()

    def show(self, inventory: Inventory, ours: Mapping[int, Ours]) -> None:
        """Take in what the machine looks like now."""
        self.inventory, self.ours = inventory, ours
        self.chosen &= {gpu.index for gpu in inventory.gpus}
        self.redraw()

    def action_toggle_gpu(self) -> None:
        """Choose the GPU with the cursor for the next launch, or not."""
        if self.gpus:
            self.chosen ^= {self.gpus[self.cursor].index}
            self.redraw()
            self.post_message(self.Selected())

    def choose_free(self) -> None:
        """Choose all free GPUs, or none when they are chosen already."""
        free = {gpu.index for gpu in self.gpus if is_free(gpu)}
        self.chosen = set() if self.chosen == free else free
        self.redraw()
        self.post_message(self.Selected())

    def count(self) -> int:
        """Return the number of GPUs."""
        return len(self.gpus)

    def head(self, width: int) -> list[Row]:
        """Return the title and the names of the columns."""
        free = sum(map(is_free, self.gpus))
        left: Row = [("GPUs", "title")]
        remarks: list[Row] = []
        if self.gpus:
            left.append((f"  {free} of {len(self.gpus)} free", "good" if free else "dim"))
            if self.chosen:
                remarks.append([(f"{len(self.chosen)} chosen", "accent"), (", enter launches on them", "dim")])
            else:
                remarks.append([("space chooses, f all free ones", "dim")])
        title = headline(width, left, remarks)
        if not self.gpus:
            return [title]
        names = " " * 3 + "GPU  "
        for column in columns_for(width):
            names += (column.title.rjust(column.wide) if column.right else column.title.ljust(column.wide)) + "  "
        return [title, cut([(names + "used by", "dim")], width)]

    def row(self, index: int, width: int) -> Row:
        """Return the line of one GPU."""
        gpu = self.gpus[index]
        return draw_gpu(gpu, width, chosen=gpu.index in self.chosen, ours=self.ours.get(gpu.index))

    def empty(self, width: int, height: int) -> list[Row]:
        """Say calmly that there is no GPU, and what works without."""
        if self.inventory is None:
            return message(width, height, ["asking the driver"])
        note = self.inventory.note or "no GPU on this machine; CPU ranks work"
        lines = _wrapped(note[:1].upper() + note[1:] + ".", width - 4)
        cores = self.inventory.cpus.usable
        if height > len(lines) + 2:
            lines += ["", f"This machine trains on its CPU: cpu_ranks = {min(cores, 4)} in [[cluster.nodes]]."]
        return message(width, height, lines)


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]


# The processes on a GPU


def draw_processes(gpu: Gpu, width: int, height: int) -> list[Row]:
    """Return who is on a GPU."""
    found = gpu.processes
    left: Row = [(f"processes on GPU {gpu.index}", "title")]
    rows: list[Row] = [headline(width, left, [[(printable(gpu.uuid), "dim")]])]
    if found is None:
        return rows + message(width, height - 1, ["the driver does not say"])
    if not found:
        return rows + message(width, height - 1, ["nobody"])
    rows.append([(f"{'pid':>8}  {'user':<12}{'GiB':>7}  {'kind':<10}process", "dim")])
    for process in found:
        memory = gib(process.memory_bytes)
        rows.append(
            [
                (f"{process.pid:>8}  ", "dim"),
                (f"{printable(process.user or EMPTY)[:11]:<12}", "bright"),
                (f"{memory:>7}  ", "bright"),
                (f"{process.kind:<10}", "dim"),
                (printable(process.name or EMPTY), "bright"),
            ]
        )
    return [cut(row, width) for row in rows[:height]]


class Processes(Canvas):
    """Who is on the GPU with the cursor."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.gpu: Gpu | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the processes of the GPU."""
        return [] if self.gpu is None else draw_processes(self.gpu, width, height)
