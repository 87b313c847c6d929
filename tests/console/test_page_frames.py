from __future__ import annotations

import time
from pathlib import Path

import pytest
from run_dirs import run_dir
from screen_frames import SIZES, assert_screen
from screens_at_rest import in_loop, quiet_app, settle, show
from test_cluster_screen import gpu, machine
from test_launch_screen import TEXT

from gputrain_tui import paths
from gputrain_tui import recipe as recipes
from gputrain_tui.console.examine import Examined
from gputrain_tui.console.screens.cluster import ClusterScreen
from gputrain_tui.console.screens.history import HistoryScreen
from gputrain_tui.console.screens.launch import LaunchScreen
from gputrain_tui.draft import key_of
from gputrain_tui.plan import LocalFacts, plan
from trainer.errors import RequestError

T0 = 1_790_000_000.0
SIZED = pytest.mark.parametrize("size", SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The history shows where a run is kept, so that place is the same for everybody.
    monkeypatch.setenv("GPUTRAIN_HOME", "home")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "runs_folder", lambda: Path("home/runs"))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(TEXT)
    (tmp_path / "recipes" / "two_nodes.toml").write_text(
        TEXT.replace("cpu_ranks = 2 ", 'host = "10.0.0.1"\ngpus = 4\n\n[[cluster.nodes]]\nhost = "10.0.0.2"\ngpus = 2')
        .replace("tiny", "two-nodes")
        .replace("max_updates = 2", "max_updates = 20_000")
    )
    return tmp_path


def examined(text: str, *, name: str, settings: list[str], task: str = "") -> Examined:
    """Plan on a machine that is the same for everybody."""
    try:
        recipe = recipes.build(text, name=name, overrides=settings)
        planned = plan(recipe, {}, local=LocalFacts(free_port=21000, names=frozenset({"10.0.0.1"})))
    except RequestError as error:
        return Examined(settings=tuple(settings), problem=str(error), key=key_of(str(error)))
    return Examined(settings=tuple(settings), recipe=recipe, plan=planned)


@SIZED
@in_loop
async def test_the_machines(size: str, folder: Path) -> None:
    app = quiet_app()
    app.desk.recipe = recipes.load("recipes/two_nodes.toml")
    gpus = [gpu(index, busy=index < 3, hot=index == 2) for index in range(8)]
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, ClusterScreen(take=lambda: machine(*gpus), runs=list, clocked=False))
        await pilot.press("end", "space", "home")
        await settle(pilot)
        assert_screen(f"cluster_{size}", app)


@SIZED
@in_loop
async def test_a_machine_without_gpus(size: str) -> None:
    app = quiet_app()
    note = "no NVIDIA driver on this machine; CPU ranks work"
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, ClusterScreen(take=lambda: machine(note=note), runs=list, clocked=False))
        assert_screen(f"cluster_without_gpus_{size}", app)


@SIZED
@in_loop
async def test_a_launch_on_two_nodes(size: str) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, LaunchScreen(settle_s=0, examine=examined))
        await pilot.press("down")
        await settle(pilot)
        assert_screen(f"launch_{size}", app)


@SIZED
@in_loop
async def test_an_editor_with_something_wrong_in_it(size: str) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        screen = LaunchScreen(settle_s=0, examine=examined)
        await show(pilot, screen)
        assert screen.draft is not None
        screen.draft.set("train.batch_size", "1, 2, 3")
        screen.form.focus()
        screen.form.go_to("train.lr")
        await pilot.press("enter", *"fast")
        await settle(pilot)
        assert_screen(f"launch_editing_{size}", app)


@SIZED
@in_loop
async def test_the_runs_and_two_of_them_compared(size: str) -> None:
    root = Path("home/runs")
    run_dir(root, "slow", started=T0, lr=0.01)
    run_dir(root, "fast", started=T0 + 100, lr=0.2, steps=80)
    run_dir(root, "a-name-that-needs-all-the-room-there-is", started=T0 + 150, status="stopped", steps=7)
    run_dir(root, "broken", started=T0 + 200, status="failed", message="rank 1 ran out of memory in backward")
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, HistoryScreen(now=lambda: T0 + 1000, clocked=False))
        await pilot.press("end", "space", "up", "space", "home")
        await settle(pilot)
        assert_screen(f"history_{size}", app)
        await pilot.press("c")
        await settle(pilot)
        app.tick()
        await settle(pilot)
        assert_screen(f"compare_{size}", app)


@SIZED
@in_loop
async def test_no_run_yet(size: str) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, HistoryScreen(clocked=False))
        assert_screen(f"history_empty_{size}", app)
