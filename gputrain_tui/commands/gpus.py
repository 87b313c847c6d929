"""``gputrain gpus``: prints the inventory of this machine or of others."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gputrain_tui.hosts.inventory import Gpu, Inventory, is_free, take_inventory, to_json, why_busy
from gputrain_tui.output import print_json, print_message
from gputrain_tui.tables import TableColumn, duration, number, printable, size, table
from trainer.contract.errors import ExitCode

if TYPE_CHECKING:
    from gputrain_tui.hosts.survey import HostReport


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the inventory as one JSON object")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="ask these hosts over ssh, without a password")
    where.add_argument(
        "--hostfile",
        metavar="FILE",
        help="ask the hosts listed in a file, one per line, such as gpu1, gpu2 slots=4, gpu3:8",
    )


def run(args: Namespace) -> int:
    """Print the inventory of this machine, or those of other hosts in the order of the flags.

    With ``--hosts`` or ``--hostfile`` the JSON is ``{"hosts": [{"host", "inventory", "problem"}]}``, even for one host:
    ``inventory`` is as for this machine, or null with a line in ``problem``. The exit code is 1 if a host does not
    answer; the others are printed all the same.
    """
    if args.hosts is None and args.hostfile is None:
        inventory = take_inventory()
        _print(to_json(inventory) if args.json else report(inventory), json=args.json)
        return ExitCode.FINISHED
    from gputrain_tui.hosts.hostfile import parse_host_list, read_hostfile
    from gputrain_tui.hosts.survey import query_hosts

    hosts = parse_host_list(args.hosts) if args.hosts is not None else read_hostfile(Path(args.hostfile))
    reports = query_hosts([entry.host for entry in hosts])
    _print(hosts_json(reports) if args.json else hosts_report(reports), json=args.json)
    silent = [found.host for found in reports if found.inventory is None]
    if silent:
        print_message(f"{len(silent)} of {len(reports)} hosts could not be queried")
    return ExitCode.FAILED if silent else ExitCode.FINISHED


def _print(text: str, *, json: bool) -> None:
    if json:
        print_json(text)
    else:
        print(text)


def hosts_json(reports: Sequence[HostReport]) -> str:
    """Return the reports of hosts as one line of JSON."""
    hosts = [
        {
            "host": found.host,
            "inventory": None if found.inventory is None else asdict(found.inventory),
            "problem": found.problem,
        }
        for found in reports
    ]
    return json.dumps({"hosts": hosts}, separators=(",", ":"), ensure_ascii=False)


def hosts_report(reports: Sequence[HostReport]) -> str:
    """Return the reports of hosts as text: a table of all, then the ``report`` of each."""
    columns = (
        TableColumn("host"),
        TableColumn("GPUs", right=True),
        TableColumn("free", right=True),
        TableColumn("threads", right=True),
        TableColumn("load", right=True),
        TableColumn("memory available", right=True),
        TableColumn("", right=False),
    )
    parts = [table(columns, [_host_row(found) for found in reports])]
    for found in reports:
        if found.inventory is not None:
            parts.append(f"{printable(found.host)}\n{'─' * len(found.host)}\n{report(found.inventory)}")
    return "\n\n".join(parts)


def _host_row(found: HostReport) -> list[str]:
    inventory = found.inventory
    if inventory is None:
        return [found.host, "", "", "", "", "", found.problem]
    memory = inventory.memory
    return [
        found.host,
        str(len(inventory.gpus)),
        str(sum(map(is_free, inventory.gpus))),
        str(inventory.cpus.usable),
        f"{inventory.load[0]:.2f}" if inventory.load is not None else "",
        _used_of_limit(size(memory.available_bytes), size(memory.total_bytes))
        if memory.total_bytes is not None
        else "",
        ", ".join(dict.fromkeys(gpu.name for gpu in inventory.gpus)),
    ]


def report(inventory: Inventory) -> str:
    """Return an inventory as text: the machine, its GPUs and their processes."""
    parts = [machine_report(inventory)]
    if inventory.gpus:
        parts.append(gpu_table(inventory.gpus))
    if any(gpu.processes for gpu in inventory.gpus):
        parts.append(process_table(inventory.gpus))
    if inventory.note:
        parts.append(printable(inventory.note))
    return "\n\n".join(parts)


def machine_report(inventory: Inventory) -> str:
    """Return host, cores, memory, load and addresses, one line each."""
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
    """Return a table with a row per GPU."""
    columns = (
        TableColumn("GPU", right=True),
        TableColumn("name"),
        TableColumn("memory", right=True),
        TableColumn("util %", right=True),
        TableColumn("°C", right=True),
        TableColumn("W", right=True),
        TableColumn("MHz", right=True),
        TableColumn("state"),
        TableColumn("PCI"),
        TableColumn("UUID"),
    )
    return table(columns, [_row(gpu) for gpu in gpus])


def _row(gpu: Gpu) -> list[str]:
    state = why_busy(gpu) or "free"
    if gpu.throttle_reasons:
        state += f"; clocks: {', '.join(gpu.throttle_reasons)}"
    return [
        str(gpu.index),
        gpu.name,
        _used_of_limit(size(gpu.memory_used_bytes), size(gpu.memory_total_bytes)),
        number(gpu.utilization_percent),
        number(gpu.temperature_celsius),
        _used_of_limit(number(gpu.power_watts), number(gpu.power_limit_watts)),
        _used_of_limit(number(gpu.sm_clock_mhz), number(gpu.max_sm_clock_mhz)),
        state,
        gpu.pci_bus_id,
        gpu.uuid,
    ]


def _used_of_limit(value: str, limit: str) -> str:
    return f"{value or '?'} / {limit}" if limit else value


def process_table(gpus: tuple[Gpu, ...]) -> str:
    """Return a table with a row per process on a GPU."""
    columns = (
        TableColumn("GPU", right=True),
        TableColumn("PID", right=True),
        TableColumn("user"),
        TableColumn("memory", right=True),
        TableColumn("kind"),
        TableColumn("process"),
    )
    rows = [
        [
            str(gpu.index),
            str(process.pid),
            process.user or "",
            size(process.memory_bytes),
            process.kind,
            process.name or "",
        ]
        for gpu in gpus
        for process in gpu.processes or ()
    ]
    return table(columns, rows)
