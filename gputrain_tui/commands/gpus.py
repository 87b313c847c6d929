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

HOST_TITLES = ("host", "GPUs", "free", "threads", "load", "memory available", "")
GPU_TITLES = ("GPU", "name", "memory", "util %", "°C", "W", "MHz", "state", "PCI", "UUID")
PROCESS_TITLES = ("GPU", "PID", "user", "memory", "kind", "process")
NUMBERS = (
    *("GPUs", "free", "threads", "load", "memory available"),
    *("GPU", "PID", "memory", "util %", "°C", "W", "MHz"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the inventory as one JSON object")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="ask these hosts over ssh, without a password")
    text = "ask the hosts listed in a file, one per line, such as gpu1, gpu2 slots=4, gpu3:8"
    where.add_argument("--hostfile", metavar="FILE", help=text)


def run(args: Namespace) -> int:
    """Print the inventory of this machine, or those of other hosts in the order of the flags.

    With ``--hosts`` or ``--hostfile`` the JSON is ``{"hosts": [{"host", "inventory", "problem"}]}``, even for one host:
    ``inventory`` is as for this machine, or null with a line in ``problem``. The exit code is 1 if a host does not
    answer; the others are printed all the same.
    """
    if args.hosts is None and args.hostfile is None:
        inventory = take_inventory()
        if args.json:
            print_json(to_json(inventory))
        else:
            print(report(inventory))
        return ExitCode.FINISHED
    from gputrain_tui.hosts.hostfile import parse_host_list, read_hostfile
    from gputrain_tui.hosts.survey import query_hosts

    hosts = parse_host_list(args.hosts) if args.hosts is not None else read_hostfile(Path(args.hostfile))
    reports = query_hosts([entry.host for entry in hosts])
    if args.json:
        print_json(_hosts_json(reports))
    else:
        print(_hosts_report(reports))
    silent = [host.host for host in reports if host.inventory is None]
    if silent:
        print_message(f"{len(silent)} of {len(reports)} hosts could not be queried")
    return ExitCode.FAILED if silent else ExitCode.FINISHED


def _hosts_json(reports: Sequence[HostReport]) -> str:
    hosts = [
        {
            "host": host.host,
            "inventory": None if host.inventory is None else asdict(host.inventory),
            "problem": host.problem,
        }
        for host in reports
    ]
    return json.dumps({"hosts": hosts}, separators=(",", ":"), ensure_ascii=False)


def _hosts_report(reports: Sequence[HostReport]) -> str:
    parts = [_table(HOST_TITLES, [_host_row(host) for host in reports])]
    for host in reports:
        if host.inventory is not None:
            parts.append(f"{printable(host.host)}\n{'─' * len(host.host)}\n{report(host.inventory)}")
    return "\n\n".join(parts)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([TableColumn(title, right=title in NUMBERS) for title in titles], rows)


def _host_row(host: HostReport) -> list[str]:
    inventory = host.inventory
    if inventory is None:
        return [host.host, *[""] * (len(HOST_TITLES) - 2), host.problem]
    memory = inventory.memory
    return [
        host.host,
        str(len(inventory.gpus)),
        str(sum(map(is_free, inventory.gpus))),
        str(inventory.cpus.usable),
        f"{inventory.load[0]:.2f}" if inventory.load is not None else "",
        _used_of_limit(size(memory.available_bytes), size(memory.total_bytes)),
        ", ".join(dict.fromkeys(gpu.name for gpu in inventory.gpus)),
    ]


def report(inventory: Inventory) -> str:
    """Return an inventory as text: the machine, its GPUs and their processes."""
    parts = [_machine(inventory)]
    if inventory.gpus:
        parts.append(_table(GPU_TITLES, [_gpu_row(gpu) for gpu in inventory.gpus]))
    if any(gpu.processes for gpu in inventory.gpus):
        rows = [
            [str(gpu.index), str(each.pid), each.user or "", size(each.memory_bytes), each.kind, each.name or ""]
            for gpu in inventory.gpus
            for each in gpu.processes or ()
        ]
        parts.append(_table(PROCESS_TITLES, rows))
    if inventory.note:
        parts.append(printable(inventory.note))
    return "\n\n".join(parts)


def _machine(inventory: Inventory) -> str:
    """Return host, cores, memory, load and addresses, one line each."""
    cpus, memory = inventory.cpus, inventory.memory
    cores = f"{cpus.physical} cores, {cpus.logical} threads" if cpus.physical else f"{cpus.logical} threads"
    if cpus.limit:
        cores += f", {cpus.usable} usable here ({cpus.limit})"
    lines = [("host", f"{inventory.host}  {inventory.system}"), ("cpu", f"{cpus.model}  {cores}".strip())]
    if memory.total_bytes is not None:
        lines.append(("memory", f"{size(memory.available_bytes)} available of {size(memory.total_bytes)}"))
    if inventory.load is not None:
        lines.append(("load", "  ".join(f"{value:.2f}" for value in inventory.load)))
    if inventory.uptime_s is not None:
        lines.append(("up", duration(inventory.uptime_s)))
    networks = [network for network in inventory.networks if network.addresses]
    lines += [("net", f"{network.name}  {', '.join(network.addresses)}") for network in networks]
    if inventory.driver:
        lines.append(("driver", f"{inventory.driver}  CUDA up to {inventory.cuda or '?'}"))
    return "\n".join(f"{name:<7} {printable(text)}" for name, text in lines)


def _gpu_row(gpu: Gpu) -> list[str]:
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
