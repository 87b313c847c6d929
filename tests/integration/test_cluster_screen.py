from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from machines import gpu, machine
from row_texts import row_text
from run_dirs import run_dir
from screens_at_rest import in_loop, open_screen, quiet_app, screen_text, settle

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.host_choice import (
    GpuRank,
    Host,
    active_plans,
    nodes_on_gpus,
    ranks_by_gpu,
    remote_hosts,
)
from gputrain_tui.console.screens.cluster_screen import ClusterScreen
from gputrain_tui.console.widgets.drawing import bar
from gputrain_tui.console.widgets.gpu_table import GpuTable, columns_for, draw_gpu, draw_host, draw_machine
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.hostfile import HostEntry
from gputrain_tui.hosts.inventory import Gpu, Inventory
from gputrain_tui.hosts.survey import HostReport
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.recipe.model import Node

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


# Drawing


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "──────────"), (0.5, "━━━━━─────"), (0.55, "━━━━━╸────"), (1.0, "━━━━━━━━━━"), (None, "    –     ")],
)
def test_a_bar_has_its_width(share: float | None, text: str) -> None:
    assert row_text(bar(share, 10)) == text


@pytest.mark.parametrize("width", [40, 78, 118, 198])
def test_a_gpus_line_fits_and_keeps_its_main_figures(width: int) -> None:
    row = draw_gpu(gpu(3, busy=True, hot=True), width, chosen=False, owner=None)
    assert len(row_text(row)) == width
    assert "slowed: heat  1 process" in row_text(row) or width < 78
    titles = [column.title for column in columns_for(width)]
    assert set(titles) >= {"name", "GiB", "util %", "°C", "W"} or width < 78
    assert "memory" in titles or width < 98
    assert ("max MHz" in titles) == (width > 150)


def test_a_gpu_of_a_run_names_run_and_rank_and_the_reason_of_throttling() -> None:
    text = row_text(draw_gpu(gpu(0, busy=True, hot=True), 180, chosen=True, owner=GpuRank(run="r1", rank=5)))
    assert "rank 5 of r1" in text
    assert "slowed: heat" in text
    assert "◉" in text


def test_the_machine_shows_its_hardware() -> None:
    text = "\n".join(row_text(row) for row in draw_machine(machine(gpu(0)), 100, 10))
    for part in ("node7", "8 cores, 16 threads", "16.0 of 64.0 GiB", "eth0 10.0.0.7 100 Gb/s", "560.35", "12.6"):
        assert part in text


# What is known


def test_the_ranks_of_running_runs_are_found_by_their_plans(tmp_path: Path) -> None:
    running = run_dir(tmp_path, "going", status="running")
    ended = run_dir(tmp_path, "ended")
    node = PlannedNode(
        node=0, host="localhost", first_rank=0, ranks=[0, 1], devices=[1, "GPU-2"], argv=["python"], env={}
    )
    away = PlannedNode(node=1, host="far", first_rank=2, ranks=[2], devices=[0], argv=["python"], env={})
    plan = Plan(world_size=3, init_method=None, backend="nccl", launcher="local", nodes=[node, away])
    for run in (running, ended):
        run.dir.plan.write_bytes(msgspec.json.encode(plan))
    plans = active_plans([ended, running])
    has = machine(gpu(0), gpu(1), gpu(2))
    assert ranks_by_gpu(has, plans, lambda host: is_local(host, LocalFacts())) == {
        1: GpuRank(run=running.id, rank=0),
        2: GpuRank(run=running.id, rank=1),
    }
    assert ranks_by_gpu(has, plans, lambda host: host == "far") == {0: GpuRank(run=running.id, rank=2)}


def test_each_remote_host_is_queried_once_and_this_machine_is_not_among_them() -> None:
    facts = LocalFacts(names=frozenset({"here"}))
    nodes = [Node(host="here"), Node(), Node(host="b"), Node(host="a"), Node(host="b"), Node(host="127.0.0.1")]
    assert remote_hosts(nodes, lambda host: is_local(host, facts)) == ("b", "a")


@pytest.mark.parametrize(
    ("host", "due"),
    [
        (Host(name="new"), True),
        (Host(name="old", surveyed_at=96.0), True),
        (Host(name="fresh", surveyed_at=96.5), False),
        (Host(name="out", surveyed_at=90.0, problem="no"), False),
        (Host(name="out", surveyed_at=80.0, problem="no"), True),
        (Host(name="busy", surveying=True), False),
    ],
)
def test_hosts_are_queried_when_due(host: Host, due: bool) -> None:
    assert host.is_due(100.0, again_s=4.0, failed_s=20.0) is due


@pytest.mark.parametrize(
    ("chosen", "nodes", "made"),
    [
        ({"b": (3, 1)}, [{"cpu_ranks": 2}], [{"host": "b", "gpus": [1, 3]}]),
        (
            {"localhost": (0,), "b": (1,)},
            [{"host": "b", "gpus": 4}],
            [{"host": "10.0.0.7", "gpus": [0]}, {"host": "b", "gpus": [1]}],
        ),
        (
            {"a": (0,), "b": (1,)},
            [{"host": "c", "gpus": 1}, {"host": "b", "gpus": 4}],
            [{"host": "b", "gpus": [1]}, {"host": "a", "gpus": [0]}],
        ),
    ],
)
def test_chosen_gpus_become_nodes_in_the_order_of_the_recipe(
    chosen: dict[str, tuple[int, ...]], nodes: list[dict[str, object]], made: list[dict[str, object]]
) -> None:
    assert nodes_on_gpus(chosen, nodes, address="10.0.0.7") == made


@pytest.mark.parametrize("width", [78, 118, 198])
def test_a_hosts_line_fits_and_has_the_reason_of_its_silence(width: int) -> None:
    host = Host(name="gpu1", inventory=machine(gpu(0), gpu(1, busy=True)), inventory_at=10.0, surveyed_at=10.0)
    for found, parts in (
        (host, ["gpu1", "1 of 2 free", "load", "now"]),
        (
            Host(name="gpu1", problem="it refuses the key: `ssh gpu1 true` must work", surveyed_at=1.0),
            ["it refuses the key"],
        ),
        (Host(name="gpu1", surveying=True), ["querying"]),
        (
            replace(host, problem="it does not answer", inventory_at=-110.0),
            ["1 of 2 free", "it does not answer", "2:00 ago"],
        ),
    ):
        text = row_text(draw_host(found, width, name_cells=8, chosen=0, now=10.0))
        assert len(text) == width
        assert all(part in text for part in parts), text


# The screen


@in_loop
async def test_choosing_gpus_puts_them_on_the_desk_for_the_launch() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = ClusterScreen(take=lambda: machine(gpu(0, busy=True), gpu(1), gpu(2)), runs=list, clocked=False)
        await open_screen(pilot, screen)
        assert "2 of 3 free" in screen_text(app)
        await pilot.press("down", "space", "down", "space", "enter")
        await settle(pilot)
        assert app.place == "launch"
        assert app.session.gpus == {"localhost": (1, 2)}  # they lie there until a recipe is open


@in_loop
async def test_all_free_gpus_are_chosen_and_unchosen_at_once() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(
            pilot, ClusterScreen(take=lambda: machine(gpu(0, busy=True), gpu(1)), runs=list, clocked=False)
        )
        await pilot.press("f")
        assert app.screen.query_one(GpuTable).chosen == {("localhost", 1)}
        await pilot.press("f")
        assert app.screen.query_one(GpuTable).chosen == set()


@in_loop
async def test_the_processes_of_the_gpu_under_the_cursor_are_shown() -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(
            pilot, ClusterScreen(take=lambda: machine(gpu(0), gpu(1, busy=True)), runs=list, clocked=False)
        )
        assert "no process" in screen_text(app)
        await pilot.press("down")
        await settle(pilot)
        assert "4001  ada" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@in_loop
async def test_a_machine_without_gpus_is_shown_with_its_driver_note(size: tuple[int, int]) -> None:
    app = quiet_app()
    note = "no NVIDIA driver on this machine; CPU ranks work"
    async with app.run_test(size=size) as pilot:
        await open_screen(pilot, ClusterScreen(take=lambda: machine(note=note), runs=list, clocked=False))
        text = screen_text(app)
        assert "No NVIDIA driver on this machine" in text
        assert "cpu_ranks" in text
        assert "Choose" not in text, "the footer offers no key that does nothing"
        await pilot.press("space", "enter", "f")
        assert app.place == "cluster"


@in_loop
async def test_a_refresh_waits_for_the_query_in_progress() -> None:
    looks = []

    def take() -> Inventory:
        looks.append(1)
        return machine(gpu(0))

    app = quiet_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = ClusterScreen(take=take, runs=list, clocked=False)
        await app.push_screen(screen)
        screen.action_sample()
        screen.action_sample()
        await settle(pilot)
        assert len(looks) == 1
        await pilot.press("ctrl+r")
        await settle(pilot)
        assert len(looks) == 2


# Other machines


def host_report(name: str, *gpus: Gpu) -> HostReport:
    return HostReport(host=name, inventory=replace(machine(*gpus), host=name))


@in_loop
async def test_gpus_of_several_machines_are_chosen_together_for_the_launch() -> None:
    app = quiet_app()
    app.session.hosts = (HostEntry(host="gpu1"), HostEntry(host="gpu2"), HostEntry(host="gpu3"))
    answers = {
        "gpu1": host_report("gpu1", gpu(0, busy=True), gpu(1)),
        "gpu2": host_report("gpu2", gpu(0), gpu(1)),
        "gpu3": HostReport(host="gpu3", problem="it refuses the key: `ssh gpu3 true` must work without a password"),
    }
    async with app.run_test(size=(120, 40)) as pilot:
        screen = ClusterScreen(take=machine, survey=answers.__getitem__, runs=list, clocked=False)
        await open_screen(pilot, screen)
        text = screen_text(app)
        assert "3 of 4 free on 4 machines" in text
        assert "it refuses the key" in text
        # this machine, gpu1, its two GPUs, gpu2: space on a machine takes what is free of it
        await pilot.press("down", "down", "down", "space", "down", "space", "enter")
        await settle(pilot)
        assert app.place == "launch"
        assert app.session.gpus == {"gpu1": (1,), "gpu2": (0, 1)}


@in_loop
async def test_a_silent_host_delays_no_other_and_keeps_its_last_report() -> None:
    app = quiet_app()
    app.session.hosts = (HostEntry(host="slow"), HostEntry(host="quick"))
    answer, clock = threading.Event(), [0.0]
    queried: list[str] = []

    def ask(name: str) -> HostReport:
        queried.append(name)
        if name == "slow":
            answer.wait(10)
        if queried.count(name) > 1:
            return HostReport(host=name, problem="it does not answer")
        return host_report(name, gpu(0))

    async with app.run_test(size=(120, 40)) as pilot:
        screen = ClusterScreen(take=machine, survey=ask, runs=list, clocked=False, now=lambda: clock[0])
        await app.push_screen(screen)
        while "1 of 1 free on 3 machines" not in screen_text(app):
            await pilot.pause()
        assert "querying" in screen_text(app)
        answer.set()
        await settle(pilot)
        assert "2 of 2 free on 3 machines" in screen_text(app)
        clock[0] = 65.0
        await pilot.press("ctrl+r")
        await settle(pilot)
        text = screen_text(app)
        assert text.count("it does not answer") == 2
        assert "1:05 ago" in text
        assert "2 of 2 free on 3 machines" in text, "what was known of them stays, with its age"


@in_loop
async def test_leaving_waits_for_no_host() -> None:
    app = quiet_app()
    app.session.hosts = (HostEntry(host="silent"),)
    reached, left = threading.Event(), threading.Event()

    def ask(name: str) -> HostReport:
        reached.set()
        left.wait(30)
        return HostReport(host=name, problem="late")

    async with app.run_test(size=(120, 40)) as pilot:
        await app.push_screen(ClusterScreen(take=machine, survey=ask, runs=list, clocked=False))
        while not reached.is_set():
            await pilot.pause()
    assert not left.is_set()
    left.set()


@in_loop
async def test_a_console_with_a_hostfile_opens_on_its_machines() -> None:
    app = GputrainApp(clocked=False, runs=list, hosts=(HostEntry(host="127.0.0.1"),))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert app.place == "cluster"


def test_a_wrong_hostfile_is_one_line_before_the_console_starts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1 slots=none\n")
    words = [sys.executable, "-m", "gputrain_tui", "--hostfile", "hosts"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == b"gputrain: hosts:1: slots is 'none', but must be a whole number from 1 to 4096\n"
