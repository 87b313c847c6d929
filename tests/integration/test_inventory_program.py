from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from fake_driver import fake_driver

from gputrain_tui.hosts.host_channel import HostChannel
from gputrain_tui.hosts.inventory import (
    Gpu,
    GpuProcess,
    Inventory,
    is_free,
    take_inventory,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


# --- NVML through its own bindings -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a libnvidia-ml.so.1 that answers as a driver with two GPUs does."""
    return fake_driver(tmp_path_factory.mktemp("nvml"))


def inventory_with(driver: Path, **environ: str) -> Inventory:
    done = subprocess.run(
        [sys.executable, "-m", "gputrain_tui", "gpus", "--json"],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **environ},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return msgspec.json.decode(done.stdout, type=Inventory)


def test_gpus_are_read_through_nvml_each_query_on_its_own(driver: Path) -> None:
    inventory = inventory_with(driver, FAKE_NVML_PID=str(os.getpid()))
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
        capability=(9, 0),
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
        capability=(7, 5),
        memory_used_bytes=GIB // 4,
        memory_total_bytes=15 * GIB,
        processes=(),
    )
    assert [is_free(gpu) for gpu in inventory.gpus] == [False, True]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        (
            "from trainer.agent.node_sampler import gpus_of;"
            "gpus = gpus_of({4: 'cuda:0 GPU-aaaa', 5: 'cuda:1 GPU-bbbb', 6: 'cuda:2 GPU-cccc'});"
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
def test_the_trainer_reads_gpus_through_the_same_driver(driver: Path, program: str, answer: str) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.stderr, done.stdout.strip()) == ("", answer)


def test_a_gpu_that_fell_off_the_bus_is_noted_and_the_others_are_read(driver: Path) -> None:
    inventory = inventory_with(driver, FAKE_NVML="lost")
    assert [gpu.index for gpu in inventory.gpus] == [0]
    assert inventory.note.startswith("GPU 1 does not answer")


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        ("unloaded", "the NVIDIA driver is installed but not loaded"),
        ("empty", "the NVIDIA driver finds no GPU"),
    ],
)
def test_a_driver_without_a_usable_gpu_is_a_normal_answer(driver: Path, mode: str, note: str) -> None:
    inventory = inventory_with(driver, FAKE_NVML=mode)
    assert inventory.gpus == ()
    assert inventory.note.startswith(note)


def test_the_program_answers_where_nothing_is_installed(tmp_path: Path) -> None:
    """What a remote host without gputrain gets: a program on standard input of a bare interpreter."""

    def command(words: Sequence[str]) -> list[str]:
        return ["env", "-C", str(tmp_path), sys.executable, "-S", *words]

    with HostChannel.started("bare", command, quoted=False) as channel:
        inventory = channel.call("inventory", msgspec.json.Decoder(Inventory), 60.0)
    here = take_inventory()
    assert (inventory.memory.total_bytes, inventory.cpus) == (here.memory.total_bytes, here.cpus)
    assert inventory.note == here.note


def test_the_command_prints_one_json_object_with_the_flag() -> None:
    done = subprocess.run([sys.executable, "-m", "gputrain_tui", "gpus", "--json"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert {"host", "cpus", "memory", "load", "gpus", "driver", "note", "networks"} <= set(found)
