"""Panel of a host: cores, load, memory, network and driver; or the error of its survey."""

from __future__ import annotations

import textwrap

from gputrain_tui.console.host_choice import Host
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, bar, fit_row, format_gib, title_row
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.tables import duration, printable


def draw_machine(inventory: Inventory, width: int, height: int, *, name: str = "") -> list[Row]:
    """Return cores, load, memory, network and driver, as many lines as fit; ``name``: empty for this machine."""
    cpus, memory = inventory.cpus, inventory.memory
    up = f"up {duration(inventory.uptime_s)}" if inventory.uptime_s is not None else ""
    also = "  this machine" if not name else f"  {printable(inventory.host)}" if inventory.host != name else ""
    left: Row = [(printable(name or inventory.host), "title"), (also, "dim")]
    head = title_row(width, left, [[(text, "dim")] for text in (printable(inventory.system), up) if text])
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    usable = f", {cpus.usable} usable here" if cpus.usable < cpus.logical else ""
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
