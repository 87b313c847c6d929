from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.commands.gpus import report
from gputrain_tui.hosts.inventory import (
    Gpu,
    GpuProcess,
    Inventory,
    is_free,
    take_inventory,
    to_json,
    why_busy,
)
from trainer.host.addresses import Network, ipv6_addresses
from trainer.host.cores import Cpus
from trainer.host.memory import Memory, read_memory

MIB = 1 << 20
GIB = 1 << 30

IDLE = Gpu(
    index=0,
    uuid="GPU-a",
    name="NVIDIA A100",
    memory_used_bytes=3 * MIB,
    memory_total_bytes=40 * GIB,
    utilization_percent=0.0,
    processes=(),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"memory_used_bytes": 2 * GIB - 1}, ""),
        ({"memory_used_bytes": 2 * GIB}, "2048 MiB in use"),
        ({"memory_used_bytes": 499 * MIB, "memory_total_bytes": 8 * GIB}, ""),
        ({"memory_used_bytes": 500 * MIB, "memory_total_bytes": 8 * GIB}, "500 MiB in use"),
        ({"processes": (GpuProcess(pid=1, user="ada"),)}, "1 process of ada"),
        ({"processes": (GpuProcess(pid=1, user="bob"), GpuProcess(pid=2, user="ada"))}, "2 processes of ada, bob"),
        ({"processes": (GpuProcess(pid=1),)}, "1 process"),
        ({"processes": (GpuProcess(pid=1, user="ada", kind="graphics"),)}, ""),
        ({"processes": None}, ""),
        ({"processes": None, "memory_used_bytes": None}, "its use is not reported"),
        ({"memory_used_bytes": None}, ""),
        ({"utilization_percent": 55.0}, "55 % utilised"),
        ({"utilization_percent": None}, ""),
        ({"mig": True}, "split into MIG instances"),
        ({"prohibited": True}, "its compute mode is prohibited"),
    ],
)
def test_a_gpu_is_free_when_no_process_uses_it(change: dict[str, object], reason: str) -> None:
    gpu = replace(IDLE, **change)  # type: ignore[arg-type]
    assert why_busy(gpu) == reason
    assert is_free(gpu) is (reason == "")


def test_memory_is_read_without_psutil_too(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n")
    assert read_memory(tmp_path) == Memory(total_bytes=2 * MIB, available_bytes=MIB)
    assert read_memory(tmp_path / "absent") == Memory()


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine_has_cores_memory_and_a_name() -> None:
    inventory = take_inventory()
    assert inventory.host
    assert 1 <= inventory.cpus.usable <= inventory.cpus.logical
    assert inventory.memory.total_bytes is not None
    assert inventory.memory.total_bytes > 64 * MIB
    assert inventory.gpus or inventory.note, "no GPU is never silent"
    assert all(network.name != "lo" for network in inventory.networks)


def test_an_inventory_survives_its_json() -> None:
    process = GpuProcess(pid=1, user="ada", name="\u8a13\x1b")
    inventory = replace(take_inventory(), gpus=(replace(IDLE, processes=(process,)), Gpu(index=1, uuid="GPU-b")))
    assert msgspec.json.decode(to_json(inventory), type=Inventory) == inventory


def test_global_addresses_of_version_6_are_read() -> None:
    table = (
        "fd000000000000000000000000000002 02 40 00 00     eth0\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert [each.text for each in ipv6_addresses(table) if not each.link_only] == ["fd00::2", "::1"]
    assert ipv6_addresses("") == []


# --- what people see -------------------------------------------------------------------------------------------------


def test_people_see_the_machine_its_gpus_and_their_processes() -> None:
    inventory = Inventory(
        host="node-a",
        time=0.0,
        system="Linux 6.8",
        cpus=Cpus(model="AMD EPYC 9654", physical=96, logical=192, usable=64, cpuset_cores=64),
        memory=Memory(total_bytes=512 * GIB, available_bytes=300 * GIB),
        load=(1.0, 2.5, 3.25),
        uptime_s=93_784.0,
        networks=(Network(name="eth0", addresses=("10.0.0.1", "fd00::1")), Network(name="ib0")),
        driver="570.86.15",
        cuda="12.8",
        gpus=(
            replace(IDLE, pci_bus_id="00000000:0b:00.0", temperature_celsius=31.0, power_watts=61.7),
            Gpu(index=1, uuid="GPU-b", name="A\x1b[2J", processes=(GpuProcess(pid=77, user="ada", memory_bytes=GIB),)),
        ),
        note="GPU 2 does not answer",
    )
    assert report(inventory).splitlines() == [
        "host    node-a  Linux 6.8",
        "cpu     AMD EPYC 9654  96 cores, 192 threads, 64 usable here (cpuset)",
        "memory  300 GiB available of 512 GiB",
        "load    1.00  2.50  3.25",
        "up      1 d 02:03",
        "net     eth0  10.0.0.1, fd00::1",
        "driver  570.86.15  CUDA up to 12.8",
        "",
        "GPU  name                 memory  util %  °C   W  MHz  state             PCI               UUID",
        "  0  NVIDIA A100  3 MiB / 40 GiB       0  31  62       free              00000000:0b:00.0  GPU-a",
        "  1  A␛[2J                                             1 process of ada                    GPU-b",
        "",
        "GPU  PID  user  memory  kind     process",
        "  1   77  ada    1 GiB  compute",
        "",
        "GPU 2 does not answer",
    ]
