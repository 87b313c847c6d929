from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from run_dirs import run_dir
from screens_at_rest import in_loop, quiet_app, seen, settle, show

from gputrain_tui import recipe as recipes
from gputrain_tui.console.screens.cluster import ClusterScreen, hosts_of, ours_on, wants
from gputrain_tui.console.widgets.drawing import text_of
from gputrain_tui.console.widgets.gpu_table import GpuTable, Ours, bar, columns_for, draw_gpu, draw_machine
from gputrain_tui.inventory import Cpus, Gpu, GpuProcess, Inventory, Memory, Network
from gputrain_tui.plan import LocalFacts, Plan, PlannedNode
from gputrain_tui.recipe import Node

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


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


# Drawing


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "──────────"), (0.5, "━━━━━─────"), (0.55, "━━━━━╸────"), (1.0, "━━━━━━━━━━"), (None, "    –     ")],
)
def test_a_bar_has_its_width(share: float | None, text: str) -> None:
    assert text_of(bar(share, 10)) == text


@pytest.mark.parametrize("width", [40, 78, 118, 198])
def test_a_gpus_line_fits_and_keeps_what_matters(width: int) -> None:
    row = draw_gpu(gpu(3, busy=True, hot=True), width, chosen=False, ours=None)
    assert len(text_of(row)) == width
    assert "slowed: heat  1 process" in text_of(row) or width < 78
    titles = [column.title for column in columns_for(width)]
    assert set(titles) >= {"name", "GiB", "util %", "°C", "W"} or width < 78
    assert "memory" in titles or width < 98
    assert ("max MHz" in titles) == (width > 150)


def test_a_gpu_of_ours_names_run_and_rank_and_a_slowed_one_says_why() -> None:
    text = text_of(draw_gpu(gpu(0, busy=True, hot=True), 180, chosen=True, ours=Ours(run="r1", rank=5)))
    assert "rank 5 of r1" in text
    assert "slowed: heat" in text
    assert "◉" in text


def test_the_machine_shows_what_it_has() -> None:
    text = "\n".join(text_of(row) for row in draw_machine(machine(gpu(0)), 100, 10))
    for part in ("node7", "8 cores, 16 threads", "16.0 of 64.0 GiB", "eth0 10.0.0.7 100 Gb/s", "560.35", "12.6"):
        assert part in text


# What is known


def test_the_ranks_of_running_runs_are_found_by_their_plans(tmp_path: Path) -> None:
    running = run_dir(tmp_path, "going", status="running")
    ended = run_dir(tmp_path, "ended")
    node = PlannedNode(node=0, host="localhost", first_rank=0, ranks=[0, 1], devices=[1, "GPU-2"], argv=[], env={})
    away = PlannedNode(node=1, host="far", first_rank=2, ranks=[2], devices=[0], argv=[], env={})
    plan = Plan(world_size=3, init_method=None, backend="nccl", launcher="local", nodes=[node, away])
    for run in (running, ended):
        run.dir.plan.write_bytes(msgspec.json.encode(plan))
    found = ours_on(machine(gpu(0), gpu(1), gpu(2)), [ended, running], LocalFacts())
    assert found == {1: Ours(run=running.id, rank=0), 2: Ours(run=running.id, rank=1)}


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (Node(gpus=4), "4 GPUs"),
        (Node(gpus=1), "1 GPU"),
        (Node(gpus="free"), "free GPUs"),
        (Node(gpus=(0, 1, 2)), "GPU 0–2"),
        (Node(gpus=(0, 2)), "GPU 0, 2"),
        (Node(cpu_ranks=2), "2 CPU ranks"),
        (Node(ranks=2), "2 ranks"),
        (Node(), "its GPUs, or one CPU rank"),
    ],
)
def test_a_node_says_what_it_asks_for(node: Node, text: str) -> None:
    assert wants(node) == text


def test_other_hosts_are_calmly_not_asked_yet() -> None:
    text = '[[cluster.nodes]]\nhost = "here"\ngpus = 2\n[[cluster.nodes]]\nhost = "there"\ngpus = 2\n'
    recipe = recipes.build(text + '[train]\ntask = "lm"\n[task]\ndata = "stdlib"\n', name="r.toml")
    hosts = hosts_of(recipe, LocalFacts(names=frozenset({"here"})))
    assert [(host.name, host.known) for host in hosts] == [("here", "this machine"), ("there", "not asked yet")]


# The screen


@in_loop
async def test_choosing_gpus_puts_them_on_the_desk_for_the_launch() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = ClusterScreen(take=lambda: machine(gpu(0, busy=True), gpu(1), gpu(2)), runs=list, clocked=False)
        await show(pilot, screen)
        assert "2 of 3 free" in seen(app)
        await pilot.press("down", "space", "down", "space", "enter")
        await settle(pilot)
        assert app.place == "launch"
        assert app.desk.gpus == (1, 2)  # they lie there until a recipe is open


@in_loop
async def test_all_free_gpus_are_chosen_and_unchosen_at_once() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, ClusterScreen(take=lambda: machine(gpu(0, busy=True), gpu(1)), runs=list, clocked=False))
        await pilot.press("f")
        assert app.screen.query_one(GpuTable).chosen == {1}
        await pilot.press("f")
        assert app.screen.query_one(GpuTable).chosen == set()


@in_loop
async def test_the_processes_of_the_gpu_under_the_cursor_are_shown() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, ClusterScreen(take=lambda: machine(gpu(0), gpu(1, busy=True)), runs=list, clocked=False))
        assert "nobody" in seen(app)
        await pilot.press("down")
        await settle(pilot)
        assert "4001  ada" in seen(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@in_loop
async def test_a_machine_without_gpus_is_told_calmly(size: tuple[int, int]) -> None:
    app = quiet_app()
    note = "no NVIDIA driver on this machine; CPU ranks work"
    async with app.run_test(size=size) as pilot:
        await show(pilot, ClusterScreen(take=lambda: machine(note=note), runs=list, clocked=False))
        text = seen(app)
        assert "No NVIDIA driver on this machine" in text
        assert "cpu_ranks" in text
        assert "No recipe is open" in text
        await pilot.press("space", "enter", "f")
        assert app.place == "cluster"


@in_loop
async def test_looking_again_waits_for_the_look_that_is_going_on() -> None:
    looks = []

    def take() -> Inventory:
        looks.append(1)
        return machine(gpu(0))

    app = quiet_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = ClusterScreen(take=take, runs=list, clocked=False)
        await app.push_screen(screen)
        screen.action_look()
        screen.action_look()
        await settle(pilot)
        assert len(looks) == 1
        await pilot.press("r")
        await settle(pilot)
        assert len(looks) == 2
