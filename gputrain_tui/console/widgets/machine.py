"""Panel of a host: cores, load, memory, network and driver; or the error of its survey."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from gputrain_tui.console.host_choice import Host
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import Row, bar, fit_row, format_gib, title_row
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.tables import duration, printable
from trainer.host.addresses import Network

LABEL_CELLS = 9
"""Cells of a line's label."""


def draw_machine(inventory: Inventory, width: int, height: int, *, name: str = "") -> list[Row]:
    """Return cores, load, memory, network and driver, as many lines as fit; ``name``: empty for this machine."""
    cpus, memory = inventory.cpus, inventory.memory
    up = f"up {duration(inventory.uptime_s)}" if inventory.uptime_s is not None else ""
    also = "  this machine" if not name else f"  {printable(inventory.host)}" if inventory.host != name else ""
    head = title_row(
        width,
        [(printable(name or inventory.host), "title"), (also, "dim")],
        [[(text, "dim")] for text in (printable(inventory.system), up) if text],
    )
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    usable = f", {cpus.usable} usable here" if cpus.usable < cpus.logical else ""
    lines: list[Row] = [
        [("cpu".ljust(LABEL_CELLS), "dim"), (cores + usable, "bright"), (f"  {printable(cpus.model)}", "dim")]
    ]
    bar_cells = min(max(width // 4, 10), 40)
    if inventory.load is not None:
        share = inventory.load[0] / max(cpus.usable, 1)
        text = "  ".join(f"{value:5.2f}" for value in inventory.load)
        lines.append(
            [
                ("load".ljust(LABEL_CELLS), "dim"),
                *bar(share, bar_cells),
                (f"  {text}", "bright"),
                ("  1, 5, 15 min", "dim"),
            ]
        )
    if memory.total_bytes is not None and memory.available_bytes is not None:
        used = memory.total_bytes - memory.available_bytes
        text = f"{format_gib(used)} of {format_gib(memory.total_bytes)} GiB"
        lines.append(
            [
                ("memory".ljust(LABEL_CELLS), "dim"),
                *bar(used / memory.total_bytes, bar_cells),
                (f"  {text}", "bright"),
                (f"  {format_gib(memory.available_bytes)} available", "dim"),
            ]
        )
    networks = [network for network in inventory.networks if network.addresses and network.up]
    if networks:
        lines.append([("network".ljust(LABEL_CELLS), "dim"), *_networks(networks)])
    if inventory.driver:
        cuda = f"  CUDA up to {inventory.cuda}" if inventory.cuda else ""
        lines.append([("driver".ljust(LABEL_CELLS), "dim"), (inventory.driver, "bright"), (cuda, "dim")])
    elif name and inventory.note:
        lines.append(
            [("GPUs".ljust(LABEL_CELLS), "dim"), (printable(inventory.note).replace(" on this machine", ""), "dim")]
        )
    return [fit_row(row, width) for row in [head, *lines][:height]]


def _networks(networks: Collection[Network]) -> Row:
    row: Row = []
    for network in networks:
        speed = f" {network.speed_mbits / 1000:g} Gb/s" if network.speed_mbits else ""
        addresses = ", ".join(network.addresses[:2])
        row += [("  " if row else "", "base"), (printable(network.name), "bright"), (f" {addresses}{speed}", "dim")]
    return row


def draw_without_inventory(host: Host, width: int, height: int) -> list[Row]:
    """Return the rows of a host without an inventory: the error of its survey, or that one is under way."""
    if host.is_local or not host.problem:
        return [title_row(width, [(printable(host.name), "title"), ("  querying", "dim")])]
    rows: list[Row] = [title_row(width, [(printable(host.name), "title"), ("  not reached", "warning")]), []]
    rows += [
        [(line, "bright")]
        for line in textwrap.wrap(f"{host.problem[:1].upper()}{host.problem[1:]}.", max(width - 2, 1))
    ]
    rows.append([("Retried periodically; ", "dim"), ("^r", "key"), (" retries now.", "dim")])
    return [fit_row(row, width) for row in rows[:height]]


class MachinePanel(Canvas):
    """Panel of one host."""

    host: Host | None = None

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the host's inventory, or the state of its survey."""
        host = self.host
        if host is None:
            return [title_row(width, [("this machine", "title"), ("  querying", "dim")])]
        if host.inventory is None:
            return draw_without_inventory(host, width, height)
        return draw_machine(host.inventory, width, height, name="" if host.is_local else host.name)
