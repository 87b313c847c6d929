from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.commands.gpus import report
from gputrain_tui.hosts.inventory import (
    MIB,
    Gpu,
    GpuProcess,
    Inventory,
    gpu_from,
    is_free,
    take_inventory,
    to_json,
    why_busy,
)
from gputrain_tui.hosts.inventory_program import inventory_program
from trainer.host.addresses import Network, ipv6_addresses
from trainer.host.cores import Cpus, usable_cores
from trainer.host.memory import Memory, memory_from
from trainer.host.nvml import RawGpu, RawProcess

ROOT = Path(__file__).parents[2]
GIB = 1024 * MIB

IDLE = Gpu(
    index=0,
    uuid="GPU-a",
    name="NVIDIA A100",
    memory_used_bytes=3 * MIB,
    memory_total_bytes=40 * GIB,
    utilization_percent=0.0,
    processes=(),
)

# --- what NVML's answers mean ----------------------------------------------------------------------------------------


def test_answers_of_nvml_become_a_gpu_in_watts_percent_and_bytes() -> None:
    raw = RawGpu(
        index=3,
        uuid="GPU-abc",
        pci_bus_id="00000000:0B:00.0",
        name="NVIDIA H100",
        memory_used=5,
        memory_total=10,
        utilization=97,
        temperature=61,
        power_mw=412_345,
        power_limit_mw=700_000,
        sm_clock=1755,
        max_sm_clock=1980,
        throttle_mask=0x1 | 0x4 | 0x40,
        mig_mode=0,
        compute_mode=0,
        processes=[
            RawProcess(pid=9, memory=None, kind="compute"),
            RawProcess(pid=7, memory=5, kind="compute"),
            RawProcess(pid=7, memory=5, kind="graphics"),
        ],
    )
    assert gpu_from(raw, {7: ("ada", "python3")}) == Gpu(
        index=3,
        uuid="GPU-abc",
        pci_bus_id="00000000:0b:00.0",
        name="NVIDIA H100",
        memory_used_bytes=5,
        memory_total_bytes=10,
        utilization_percent=97.0,
        temperature_celsius=61.0,
        power_watts=412.345,
        power_limit_watts=700.0,
        sm_clock_mhz=1755,
        max_sm_clock_mhz=1980,
        throttle_reasons=("power_cap", "thermal_hardware"),
        processes=(
            GpuProcess(pid=7, user="ada", name="python3", memory_bytes=5),
            GpuProcess(pid=9, user=None, name=None, memory_bytes=None),
        ),
    )


def test_a_gpu_that_refuses_every_query_is_listed_with_nothing_measured() -> None:
    assert gpu_from(RawGpu(index=1), {}) == Gpu(index=1, uuid="")


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
        ({"processes": None, "memory_used_bytes": None}, "it does not say who uses it"),
        ({"memory_used_bytes": None}, ""),
        ({"utilization_percent": 55.0}, "55 % utilised"),
        ({"utilization_percent": None}, ""),
        ({"mig": True}, "split into MIG instances"),
        ({"prohibited": True}, "its compute mode is prohibited"),
    ],
)
def test_a_gpu_is_free_when_nobody_computes_on_it(change: dict[str, object], reason: str) -> None:
    gpu = replace(IDLE, **change)  # type: ignore[arg-type]
    assert why_busy(gpu) == reason
    assert is_free(gpu) is (reason == "")


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [(8, "", 8), (8, "max 100000\n", 8), (8, "250000 100000\n", 3), (8, "5000 100000", 1), (2, "800000 100000", 2)],
)
def test_a_container_s_quota_limits_the_usable_cores(affinity: int, cpu_max: str, cores: int) -> None:
    assert usable_cores(affinity, cpu_max) == cores


def test_memory_is_read_without_psutil_too() -> None:
    meminfo = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n"
    assert memory_from(meminfo) == Memory(total_bytes=2 * MIB, available_bytes=MIB)
    assert memory_from("") == Memory()


# --- NVML through its own bindings -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a libnvidia-ml.so.1 that answers as a driver with two GPUs does."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of the NVIDIA driver")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[1] / "support" / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def inventory_with(driver: Path, **environ: str) -> Inventory:
    done = subprocess.run(
        [sys.executable, "-m", "gputrain_tui.hosts.inventory"],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **environ},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return msgspec.json.decode(done.stdout, type=Inventory)


def test_gpus_are_read_through_nvml_each_query_on_its_own(fake_driver: Path) -> None:
    inventory = inventory_with(fake_driver, FAKE_NVML_PID=str(os.getpid()))
    assert (inventory.driver, inventory.cuda, inventory.note) == ("570.86.15", "12.8", "")
    busy, small = inventory.gpus
    assert busy.processes is not None
    ours, unseen = busy.processes
    assert (ours.pid, ours.user, ours.memory_bytes) == (os.getpid(), getpass.getuser(), 19 * GIB)
    assert unseen == GpuProcess(pid=4194305)
    assert replace(busy, processes=()) == Gpu(
        index=0,
        uuid="GPU-aaaa",
        pci_bus_id="00000000:0b:00.0",
        name="NVIDIA H100",
        memory_used_bytes=20 * GIB,
        memory_total_bytes=80 * GIB,
        utilization_percent=97.0,
        temperature_celsius=61.0,
        power_watts=412.345,
        power_limit_watts=700.0,
        sm_clock_mhz=1755,
        max_sm_clock_mhz=1980,
        throttle_reasons=("power_cap", "thermal_software"),
        processes=(),
    )
    assert small == Gpu(
        index=1,
        uuid="GPU-bbbb",
        pci_bus_id="00000000:0c:00.0",
        name="NVIDIA T4",
        memory_used_bytes=GIB // 4,
        memory_total_bytes=15 * GIB,
        processes=(),
    )
    assert [is_free(gpu) for gpu in inventory.gpus] == [False, True]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        (
            "from trainer.agent.node_sampler import Gpus; gpus = Gpus({4: 'GPU-aaaa', 5: 'GPU-bbbb', 6: 'GPU-cccc'});"
            "print(*((s.index, s.rank, s.utilization_percent, s.memory_used_bytes, s.power_watts, s.throttle_reasons)"
            "for s in gpus.sample())); gpus.close()",
            f"(0, 4, 97, {20 * GIB}, 412.345, ['power_cap', 'thermal_software']) (1, 5, None, {GIB // 4}, None, [])",
        ),
        (
            "from trainer.host.visible_devices import visible_devices, label; d = visible_devices({});"
            "print([label(i, d) for i in range(len(d))], visible_devices({'CUDA_VISIBLE_DEVICES': '1'})[0].name)",
            "['cuda:0 GPU-aaaa', 'cuda:1 GPU-bbbb'] NVIDIA T4",
        ),
    ],
    ids=["the node's samples", "the devices of the ranks"],
)
def test_the_trainer_reads_gpus_through_the_same_driver(fake_driver: Path, program: str, answer: str) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.stderr, done.stdout.strip()) == ("", answer)


def test_a_gpu_that_fell_off_the_bus_is_noted_and_the_others_are_read(fake_driver: Path) -> None:
    inventory = inventory_with(fake_driver, FAKE_NVML="lost")
    assert [gpu.index for gpu in inventory.gpus] == [0]
    assert inventory.note.startswith("GPU 1 does not answer")


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        ("unloaded", "the NVIDIA driver is installed but not loaded"),
        ("empty", "the NVIDIA driver finds no GPU"),
    ],
)
def test_a_driver_without_a_usable_gpu_is_a_normal_answer(fake_driver: Path, mode: str, note: str) -> None:
    inventory = inventory_with(fake_driver, FAKE_NVML=mode)
    assert inventory.gpus == ()
    assert inventory.note.startswith(note)


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


def test_the_program_answers_where_nothing_is_installed(tmp_path: Path) -> None:
    """What a remote host without gputrain gets: a program on standard input of a bare interpreter."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", "frame:"],
        input=inventory_program(),
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(b"frame:{")
    inventory = msgspec.json.decode(done.stdout.removeprefix(b"frame:"), type=Inventory)
    here = take_inventory()
    assert (inventory.memory.total_bytes, inventory.cpus) == (here.memory.total_bytes, here.cpus)
    assert inventory.note == here.note


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
        cpus=Cpus(model="AMD EPYC 9654", physical=96, logical=192, usable=64),
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
        "cpu     AMD EPYC 9654  96 cores, 192 threads, 64 usable here",
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


def test_the_command_prints_one_json_object_with_the_flag() -> None:
    done = subprocess.run([sys.executable, "-m", "gputrain_tui", "gpus", "--json"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert {"host", "cpus", "memory", "load", "gpus", "driver", "note", "networks"} <= set(found)
