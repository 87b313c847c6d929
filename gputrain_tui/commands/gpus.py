"""``gputrain gpus``: what this machine has to train on, and who uses it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from gputrain_tui.inventory import Gpu, Inventory, take_inventory, to_json, why_busy
from gputrain_tui.tables import Column, duration, number, printable, size, table
from trainer.errors import ExitCode

NAME = "gpus"
HELP = "show the GPUs, cores and memory of this machine"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the inventory as one JSON object")


def run(args: Namespace) -> int:
    """Print the inventory."""
    inventory = take_inventory()
    print(to_json(inventory) if args.json else report(inventory))
    return ExitCode.FINISHED


def report(inventory: Inventory) -> str:
    """The inventory for people: the machine, its GPUs, and the processes on them."""
    parts = [machine(inventory)]
    if inventory.gpus:
        parts.append(gpu_table(inventory.gpus))
    if any(gpu.processes for gpu in inventory.gpus):
        parts.append(process_table(inventory.gpus))
    if inventory.note:
        parts.append(inventory.note)
    return "\n\n".join(parts)


def machine(inventory: Inventory) -> str:
    """Host, cores, memory, load and addresses, one line each."""
    cpus, memory = inventory.cpus, inventory.memory
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    if cpus.usable < cpus.logical:
        cores += f", {cpus.usable} usable here"
    lines = [("host", f"{inventory.host}  {inventory.system}"), ("cpu", f"{cpus.model}  {cores}".strip())]
    if memory.total_bytes is not None:
        lines.append(("memory", f"{size(memory.available_bytes)} available of {size(memory.total_bytes)}"))
    if inventory.load is not None:
        lines.append(("load", "  ".join(f"{value:.2f}" for value in inventory.load)))
    if inventory.uptime_s is not None:
        lines.append(("up", duration(inventory.uptime_s)))
    lines += [
        ("net", f"{network.name}  {', '.join(network.addresses)}")
        for network in inventory.networks
        if network.addresses
    ]
    if inventory.driver:
        lines.append(("driver", f"{inventory.driver}  CUDA up to {inventory.cuda or '?'}"))
    return "\n".join(f"{name:<7} {printable(text)}" for name, text in lines)


def gpu_table(gpus: tuple[Gpu, ...]) -> str:
    """One row per GPU."""
    columns = (
        Column("GPU", right=True),
        Column("name"),
        Column("memory", right=True),
        Column("util %", right=True),
        Column("°C", right=True),
        Column("W", right=True),
        Column("MHz", right=True),
        Column("state"),
        Column("PCI"),
        Column("UUID"),
    )
    return table(columns, [_row(gpu) for gpu in gpus])


def _row(gpu: Gpu) -> list[str]:
    state = why_busy(gpu) or "free"
    if gpu.throttle_reasons:
        state += f"; clocks: {', '.join(gpu.throttle_reasons)}"
    return [
        str(gpu.index),
        printable(gpu.name),
        _of(size(gpu.memory_used_bytes), size(gpu.memory_total_bytes)),
        number(gpu.utilization_percent),
        number(gpu.temperature_celsius),
        _of(number(gpu.power_watts), number(gpu.power_limit_watts)),
        _of(number(gpu.sm_clock_mhz), number(gpu.max_sm_clock_mhz)),
        printable(state),
        gpu.pci_bus_id,
        gpu.uuid,
    ]


def _of(value: str, limit: str) -> str:
    return f"{value or '?'} / {limit}" if limit else value


def process_table(gpus: tuple[Gpu, ...]) -> str:
    """One row per process on a GPU."""
    columns = (
        Column("GPU", right=True),
        Column("PID", right=True),
        Column("user"),
        Column("memory", right=True),
        Column("kind"),
        Column("process"),
    )
    rows = [
        [
            str(gpu.index),
            str(process.pid),
            process.user or "",
            size(process.memory_bytes),
            process.kind,
            printable(process.name or ""),
        ]
        for gpu in gpus
        for process in gpu.processes or ()
    ]
    return table(columns, rows)
