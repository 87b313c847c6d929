"""Fictitious machines for the cluster screen: inventories of this one, and of others over ssh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from run_dirs import run_dir
from screens_at_rest import open_screen, settle
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.cluster_screen import ClusterScreen
from gputrain_tui.history.run_folders import Run
from gputrain_tui.hosts.hostfile import parse_hosts
from gputrain_tui.hosts.inventory import Gpu, GpuProcess, Inventory
from gputrain_tui.hosts.survey import HostReport
from gputrain_tui.plan.planner import Plan, PlannedNode
from trainer.contract.record import RunDir
from trainer.host.addresses import Network
from trainer.host.cores import Cpus
from trainer.host.memory import Memory

GIB = 1 << 30
HOSTS = "gpu1 gpus=0,1,2,3\nada@gpu2 slots=2\ncpu9\ngpu3\n"
NO_DRIVER = "no NVIDIA driver on this machine; CPU ranks work"
TWO_NODES = """name = "two-nodes"

[[cluster.nodes]]
host = "gpu1"
gpus = 4

[[cluster.nodes]]
host = "ada@gpu2"
gpus = 2

[train]
task = "lm"

[task]
data = "stdlib"
"""


def gpu(index: int, *, busy: bool = False, hot: bool = False) -> Gpu:
    process = GpuProcess(pid=4000 + index, user="ada", name="python", memory_bytes=70 * GIB)
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        pci_bus_id=f"00000000:{index:02x}:00.0",
        name="NVIDIA H200",
        memory_used_bytes=70 * GIB if busy else 0,
        memory_total_bytes=140 * GIB,
        utilization_percent=97.0 if busy else 0.0,
        temperature_celsius=88.0 if hot else 40.0,
        power_watts=650.0,
        power_limit_watts=700.0,
        sm_clock_mhz=1980,
        max_sm_clock_mhz=1980,
        throttle_reasons=("thermal_software",) if hot else (),
        processes=(process,) if busy else (),
    )


def machine(*gpus: Gpu, note: str = "") -> Inventory:
    return Inventory(
        host="node7",
        time=0.0,
        system="Linux 6.8",
        cpus=Cpus(model="Xeon", physical=8, logical=16, usable=16),
        memory=Memory(total_bytes=64 * GIB, available_bytes=48 * GIB),
        load=(1.0, 2.0, 3.0),
        uptime_s=3600.0,
        networks=(Network(name="eth0", addresses=("10.0.0.7",), speed_mbits=100_000),),
        driver="560.35" if gpus else None,
        cuda="12.6" if gpus else None,
        gpus=gpus,
        note=note,
    )


def host_report(host: str, *gpus: Gpu, load: float, cores: int, used: int, note: str = "") -> HostReport:
    found = Inventory(
        host=host,
        time=0.0,
        system="Linux 5.15",
        cpus=Cpus(model="AMD EPYC 9654", physical=cores // 2, logical=cores, usable=cores),
        memory=Memory(total_bytes=1024 * GIB, available_bytes=(1024 - used) * GIB),
        load=(load, load * 0.9, load * 0.8),
        uptime_s=40 * 86400.0,
        networks=(Network(name="ib0", addresses=("10.0.0.21",), speed_mbits=400_000),),
        driver="570.86" if gpus else None,
        cuda="12.8" if gpus else None,
        gpus=gpus,
        note=note,
    )
    return HostReport(host=host, inventory=found)


def small_gpu(index: int, *, user: str = "") -> Gpu:
    process = GpuProcess(pid=7100 + index, user=user, name="python3", memory_bytes=31 * GIB)
    return replace(
        gpu(index),
        uuid=f"GPU-b{index}",
        name="NVIDIA A100-SXM4-40GB",
        memory_total_bytes=40 * GIB,
        memory_used_bytes=31 * GIB if user else GIB // 2,
        utilization_percent=88.0 if user else 0.0,
        power_watts=310.0 if user else 55.0,
        power_limit_watts=400.0,
        sm_clock_mhz=1410 if user else 210,
        max_sm_clock_mhz=1410,
        processes=(process,) if user else (),
    )


ANSWERS = {
    "gpu1": host_report("gpu1", *(gpu(index, busy=index < 2) for index in range(4)), load=21.5, cores=192, used=310),
    "ada@gpu2": host_report(
        "gpu2",
        small_gpu(0, user="ada"),
        small_gpu(1, user="bob"),
        small_gpu(2),
        small_gpu(3),
        load=88.0,
        cores=96,
        used=980,
    ),
    "cpu9": host_report("cpu9", load=3.0, cores=64, used=40, note="no NVIDIA driver on this machine; CPU ranks work"),
    "gpu3": HostReport(host="gpu3", problem="it refuses the key: `ssh gpu3 true` must work without a password"),
}


def run_on_gpu1(folder: Path) -> list[Run]:
    """Return a run with two ranks on gpu1, under a fixed name."""
    run = run_dir(folder, "llm", status="running", steps=1)
    node = PlannedNode(
        node=0, host="gpu1", first_rank=0, ranks=[0, 1], devices=["GPU-0", "GPU-1"], argv=["python"], env={}
    )
    plan = Plan(world_size=2, init_method=None, backend="nccl", launcher="ssh", nodes=[node])
    run.dir.plan.write_bytes(msgspec.json.encode(plan))
    return [replace(run, dir=RunDir(run.dir.path.rename(folder / "llm-1")))]


async def open_several_hosts(pilot: Pilot[Any], folder: Path) -> None:
    app = pilot.app
    assert isinstance(app, GputrainApp)
    app.session.hosts, app.session.hostfile = parse_hosts(HOSTS, name="hosts"), "hosts"
    runs = run_on_gpu1(folder)
    screen = ClusterScreen(
        take=lambda: machine(gpu(0, busy=True), gpu(1, hot=True)),
        survey=ANSWERS.__getitem__,
        runs=lambda: runs,
        clocked=False,
        now=lambda: 100.0,
    )
    await open_screen(pilot, screen)
    await pilot.press("down", "down", "down", "down", "down", "down", "space", "down", "space")
    await settle(pilot)
