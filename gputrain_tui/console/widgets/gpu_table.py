"""Table of the GPUs of all hosts with the choice for the next launch, and panels of one host and one GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence, Set
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
    row_cells,
    title_row,
)
from gputrain_tui.console.widgets.table_columns import Column, fitting, number_column, text_column
from gputrain_tui.hosts.inventory import Gpu, Inventory, is_free, why_busy
from gputrain_tui.tables import GIB, duration, printable


def draw_machine(inventory: Inventory, width: int, height: int, *, name: str = "") -> list[Row]:
    """Return cores, load, memory, network and driver, as many lines as fit; ``name``: empty for this machine."""
    cpus, memory = inventory.cpus, inventory.memory
    up = f"up {duration(inventory.uptime_s)}" if inventory.uptime_s is not None else ""
    also = "  this machine" if not name else f"  {printable(inventory.host)}" if inventory.host != name else ""
    left: Row = [(printable(name or inventory.host), "title"), (also, "dim")]
    head = title_row(width, left, [[(text, "dim")] for text in (printable(inventory.system), up) if text])
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    usable = f", {cpus.usable} usable here ({cpus.limit})" if cpus.limit else ""
    facts: list[tuple[str, Row]] = [("cpu", [(cores + usable, "bright"), (f"  {printable(cpus.model)}", "dim")])]
    bar_cells = min(max(width // 4, 10), 40)
    if inventory.load is not None:
        share = bar(inventory.load[0] / max(cpus.usable, 1), bar_cells)
        text = "".join(f"  {value:5.2f}" for value in inventory.load)
        facts.append(("load", [*share, (text, "bright"), ("  1, 5, 15 min", "dim")]))
    if memory.total_bytes is not None and memory.available_bytes is not None:
        used = memory.total_bytes - memory.available_bytes
        text = f"  {format_gib(used)} of {format_gib(memory.total_bytes)} GiB"
        available = f"  {format_gib(memory.available_bytes)} available"
        facts.append(("memory", [*bar(used / memory.total_bytes, bar_cells), (text, "bright"), (available, "dim")]))
    networks: Row = []
    for network in inventory.networks:
        if network.addresses and network.up:
            speed = f" {network.speed_mbits / 1000:g} Gb/s" if network.speed_mbits else ""
            text = f" {', '.join(network.addresses[:2])}{speed}"
            networks += [("  " if networks else "", "base"), (printable(network.name), "bright"), (text, "dim")]
    if networks:
        facts.append(("network", networks))
    if inventory.driver:
        cuda = f"  CUDA up to {inventory.cuda}" if inventory.cuda else ""
        facts.append(("driver", [(inventory.driver, "bright"), (cuda, "dim")]))
    elif name and inventory.note:
        facts.append(("GPUs", [(printable(inventory.note).replace(" on this machine", ""), "dim")]))
    rows = [head, *([(f"{label:<9}", "dim"), *pieces] for label, pieces in facts)]
    return [fit_row(row, width) for row in rows[:height]]


class MachinePanel(Canvas):
    """Panel of one host."""

    host: Host | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        host = self.host
        if host is not None and host.inventory is not None:
            return draw_machine(host.inventory, width, height, name="" if host.is_local else host.name)
        name = "this machine" if host is None else printable(host.name)
        if host is None or host.is_local or not host.problem:
            return [title_row(width, [(name, "title"), ("  querying", "dim")])]
        rows: list[Row] = [title_row(width, [(name, "title"), ("  not reached", "warning")]), []]
        problem = textwrap.wrap(f"{host.problem[:1].upper()}{host.problem[1:]}.", max(width - 2, 1))
        rows += [[(line, "bright")] for line in problem]
        rows.append([("Retried periodically; ", "dim"), ("^r", "key"), (" retries now.", "dim")])
        return rows[:height]


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB


def _memory_share(gpu: Gpu) -> float | None:
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return gpu.memory_used_bytes / gpu.memory_total_bytes


HOT_CELSIUS = 85
"""Temperature that is shown as a warning: GPUs begin to throttle a little above."""
COLUMNS: tuple[Column[Gpu], ...] = (
    text_column("name", 14, 2, lambda gpu: gpu.name.removeprefix("NVIDIA ")),
    text_column("memory", 10, 5, _memory_share),
    number_column("GiB", 6, 1, lambda gpu: _gib(gpu.memory_used_bytes), digits=1),
    number_column("of", 6, 6, lambda gpu: _gib(gpu.memory_total_bytes), digits=1, role="dim"),
    number_column("util %", 6, 0, lambda gpu: gpu.utilization_percent,
                  role=lambda gpu: "bright" if (gpu.utilization_percent or 0) >= 1 else "dim"),
    number_column("°C", 3, 3, lambda gpu: gpu.temperature_celsius,
                  role=lambda gpu: "warning" if (gpu.temperature_celsius or 0) >= HOT_CELSIUS else "dim"),
    number_column("W", 5, 4, lambda gpu: gpu.power_watts, role="dim"),
    number_column("max W", 5, 8, lambda gpu: gpu.power_limit_watts, role="dim"),
    number_column("MHz", 5, 7, lambda gpu: gpu.sm_clock_mhz,
                  role=lambda gpu: "warning" if gpu.throttle_reasons else "dim"),
    number_column("max MHz", 7, 9, lambda gpu: gpu.max_sm_clock_mhz, role="dim"),
    text_column("PCI", 16, 10, lambda gpu: gpu.pci_bus_id, role="dim"),
)  # fmt: skip
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


def columns_for(width: int) -> list[Column[Gpu]]:
    """Return the most important columns, as many as fit."""
    state_cells = 26  # fewest cells of the last column: throttle reasons and users
    index_cells = 8  # cells of the sign and the GPU's index, before the columns
    return fitting(COLUMNS, width - index_cells - state_cells)


def draw_gpu(gpu: Gpu, width: int, *, chosen: bool, owner: GpuRank | None) -> Row:
    """Return the line of one GPU."""
    free = is_free(gpu)
    sign = ("◉", "accent") if chosen else ("○", "good") if free else (" ", "dim")
    row: Row = [(" ", "base"), sign, (f"{gpu.index:>4}", "bright"), ("  ", "base")]
    for column in columns_for(width):
        if column.key == "memory":
            row += bar(_memory_share(gpu), column.width)
        else:
            row.append((column.text(gpu), column.role_of(gpu)))
        row.append(("  ", "base"))
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


def _age(host: Host, now: float) -> tuple[str, str]:
    """Return the age of a host's inventory as text, and its role."""
    if host.inventory_at is None:
        return ("asking" if host.surveying or host.surveyed_at is None else "", "dim")
    old = max(now - host.inventory_at, 0.0)
    stale_s = 30.0  # age of an inventory, seconds, from which it is shown as a warning
    return ("now" if old < 3 else f"{duration(old)} ago", "warning" if old >= stale_s else "dim")


def draw_host(host: Host, width: int, *, name_cells: int, chosen: int, now: float) -> Row:
    """Return the line of a host above its GPUs; ``chosen``: number of its GPUs chosen for the launch."""
    row: Row = [(f" {printable(host.display_name)[:name_cells]:<{name_cells}}  ", "title")]
    if host.inventory is None:
        return fit_row([*row, (host.problem or "querying", "dim")], width)
    free = len(host.free)
    share = f"{free} of {len(host.gpus)} free" if host.gpus else "no GPU"
    row += [(f"{share:<13}", "good" if free else "dim"), ("  ", "base")]
    tail: Row = [*([(f"{chosen} chosen  ", "accent")] if chosen else []), _age(host, now), (" ", "base")]
    if host.problem:
        row += [(host.problem, "warning"), ("  ", "base")]
    else:
        for piece in _facts(host.inventory):
            if row_cells(row) + row_cells(piece) + row_cells(tail) + 2 > width:
                break
            row += [*piece, ("  ", "base")]
    return fit_row([*fit_row(row, max(width - row_cells(tail) - 1, 0)), (" ", "base"), *tail], width)


def _facts(inventory: Inventory) -> list[Row]:
    """Return load, memory, fastest network and driver of a host, those that are known."""
    facts: list[Row] = []
    cores, memory = inventory.cpus.usable, inventory.memory
    if inventory.load is not None:
        load = inventory.load[0]
        share = bar(load / max(cores, 1), 6)
        facts.append([("load ", "dim"), *share, (f" {load:5.1f}", "bright"), (f"/{cores:<3}", "dim")])
    if memory.total_bytes and memory.available_bytes is not None:
        used = memory.total_bytes - memory.available_bytes
        total = f"/{format_gib(memory.total_bytes, 0)} GiB"
        share = bar(used / memory.total_bytes, 6)
        facts.append([("memory ", "dim"), *share, (f" {format_gib(used, 0):>4}", "bright"), (f"{total:<9}", "dim")])
    up = [network for network in inventory.networks if network.up and network.addresses]
    fast = max(up, key=lambda network: network.speed_mbits or 0, default=None)
    if fast is not None:
        speed = f" {fast.speed_mbits / 1000:g} Gb/s" if fast.speed_mbits else ""
        facts.append([(f"{printable(fast.name)} {fast.addresses[0]}{speed}", "dim")])
    if inventory.driver:
        facts.append([(f"driver {inventory.driver}", "dim")])
    return facts


HostOrGpu = tuple[Host, Gpu | None]


class GpuTable(Listing[HostOrGpu]):
    """List of the GPUs of every host; with several hosts, below a line for each."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "toggle_gpu", "Select", show=False)]

    hosts: Sequence[Host] = ()
    now = 0.0
    chosen: Set[tuple[str, int]] = frozenset()
    """Host and index of each GPU chosen for the launch."""

    @property
    def several(self) -> bool:
        return len(self.hosts) > 1

    @property
    def host(self) -> Host | None:
        """The host under the cursor."""
        return self.current[0] if self.current else self.hosts[0] if self.hosts else None

    @property
    def gpu(self) -> Gpu | None:
        """The GPU under the cursor; None on the line of a host."""
        return self.current[1] if self.current else None

    def key(self, line: HostOrGpu) -> tuple[str, int | None]:
        host, gpu = line
        return host.name, None if gpu is None else gpu.index

    def show(self, hosts: Sequence[Host], *, now: float) -> None:
        self.hosts, self.now = hosts, now
        self.chosen &= {(host.name, gpu.index) for host in hosts for gpu in host.gpus}
        self.show_lines([(host, gpu) for host in hosts for gpu in (*((None,) if self.several else ()), *host.gpus)])

    def chosen_by_host(self) -> dict[str, tuple[int, ...]]:
        """Return indices of the chosen GPUs by host; without a choice, the GPU or host's free GPUs under the cursor."""
        chosen = self.chosen
        host, gpu = self.host, self.gpu
        if not chosen and host is not None:
            chosen = {(host.name, index) for index in ((gpu.index,) if gpu is not None else host.free)}
        by_host = {
            host.name: tuple(sorted(index for name, index in chosen if name == host.name)) for host in self.hosts
        }
        return {name: indices for name, indices in by_host.items() if indices}

    def action_toggle_gpu(self) -> None:
        """Choose the GPU under the cursor for the launch, or undo the choice; on a host's line all its free ones."""
        host, gpu = self.host, self.gpu
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
        free = {(host.name, index) for host in self.hosts for index in host.free}
        self.chosen = set() if self.chosen == free else free
        self.redraw()

    def head(self, width: int) -> list[Row]:
        gpus = [gpu for host in self.hosts for gpu in host.gpus]
        if not gpus:
            return [title_row(width, [("GPUs", "title")])]
        free = sum(map(is_free, gpus))
        left: Row = [("GPUs", "title"), (f"  {free} of {len(gpus)} free", "good" if free else "dim")]
        if self.several:
            left.append((f" on {len(self.hosts)} machines", "dim"))
        right: Row = [("space chooses, f all free ones", "dim")]
        if self.chosen:
            right = [(f"{len(self.chosen)} chosen", "accent"), (", enter launches on them", "dim")]
        names = "".join(f"{column.aligned_title}  " for column in columns_for(width))
        return [title_row(width, left, [right]), [(f"   GPU  {names}used by", "dim")]]

    def row(self, line: HostOrGpu, width: int) -> Row:
        host, gpu = line
        if gpu is not None:
            chosen = (host.name, gpu.index) in self.chosen
            return draw_gpu(gpu, width, chosen=chosen, owner=host.run_ranks.get(gpu.index))
        longest = max(len(each.display_name) for each in self.hosts)
        count = sum(name == host.name for name, _ in self.chosen)
        return draw_host(host, width, name_cells=min(longest, max(width // 4, 12)), chosen=count, now=self.now)

    def empty(self, width: int, height: int) -> list[Row]:
        inventory = self.hosts[0].inventory if self.hosts else None
        if inventory is None:
            return centred_text(width, height, ["querying the driver"])
        note = inventory.note or "no GPU on this machine; CPU ranks work"
        lines = textwrap.wrap(note[:1].upper() + note[1:] + ".", max(width - 4, 1))
        cores = inventory.cpus.usable
        if height > len(lines) + 2:
            lines += ["", f"This machine trains on its CPU: cpu_ranks = {min(cores, 4)} in [[cluster.nodes]]."]
        return centred_text(width, height, lines)


class ProcessList(Canvas):
    """Panel of the processes on the GPU under the cursor."""

    gpu: Gpu | None = None
    of = ""
    """Name of the GPU's host; empty if there is only one host."""

    def draw(self, width: int, height: int) -> list[Row]:
        gpu = self.gpu
        if gpu is None:
            return []
        title = f"processes on GPU {gpu.index}{f' of {printable(self.of)}' if self.of else ''}"
        rows: list[Row] = [title_row(width, [(title, "title")], [[(printable(gpu.uuid), "dim")]])]
        if not gpu.processes:
            text = "not reported by the driver" if gpu.processes is None else "no process"
            return rows + centred_text(width, height - 1, [text])
        rows.append([(f"{'pid':>8}  {'user':<12}{'GiB':>7}  {'kind':<10}process", "dim")])
        for process in gpu.processes:
            user, memory = printable(process.user or EMPTY)[:11], format_gib(process.memory_bytes)
            rows.append(
                [
                    (f"{process.pid:>8}  ", "dim"),
                    (f"{user:<12}{memory:>7}  ", "bright"),
                    (f"{process.kind:<10}", "dim"),
                    (printable(process.name or EMPTY), "bright"),
                ]
            )
        return rows[:height]
