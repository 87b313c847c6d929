"""The README's pictures: screens of runs that never ran, drawn again by every test and compared.

``UPDATE_GOLDEN=1 pytest tests/integration/test_whole_screens.py`` draws them anew.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from launch_screens import fixed_folder
from screen_frames import console, press, settle
from screens_at_rest import in_loop, quiet_app, show
from screens_at_rest import settle as rest
from test_cluster_frames import several
from test_launch_frames import examined
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.history import HistoryScreen
from gputrain_tui.console.screens.launch import LaunchScreen

PICTURES = Path(__file__).parents[1] / "golden" / "pictures"
SIZE = (150, 44)
RECIPE = """# Four GPUs here, two there: ranks 0 to 3 and 4 to 5.
name = "two-nodes"

[[cluster.nodes]]
host = "10.0.0.1"
gpus = 4

[[cluster.nodes]]
host = "10.0.0.2"
gpus = 2

[train]
task = "lm"
batch_size = 32
max_updates = 20_000
optimizer = "adamw"
lr = 0.0006

[task]
data = "books/*.txt"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kept = fixed_folder(tmp_path, monkeypatch)
    (kept / "recipes" / "two_nodes.toml").write_text(RECIPE)
    return kept


async def a_run(take: Callable[[Pilot[Any]], Awaitable[None]], folder: Path) -> None:
    run = synthetic.run(folder, name="bert", nodes=3, ranks_per_node=8, steps=420, total=1000, straggler=13)
    app = console(run)
    async with app.run_test(size=(170, 52)) as pilot:
        await settle(pilot)
        await press(pilot, *["down"] * 14)
        await settle(pilot)
        await take(pilot)


async def a_failed_run(take: Callable[[Pilot[Any]], Awaitable[None]], folder: Path) -> None:
    run = synthetic.run(folder, name="bert", nodes=2, ranks_per_node=8, steps=240, culprit=11, status="failed")
    app = console(run)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await settle(pilot)
        await take(pilot)


async def a_launch(take: Callable[[Pilot[Any]], Awaitable[None]], folder: Path) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZE) as pilot:
        await show(pilot, LaunchScreen(settle_s=0, examine=examined))
        await take(pilot)


async def a_cluster(take: Callable[[Pilot[Any]], Awaitable[None]], folder: Path) -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await several(pilot, folder)
        await take(pilot)


async def a_comparison(take: Callable[[Pilot[Any]], Awaitable[None]], folder: Path) -> None:
    from run_dirs import run_dir

    root = Path("home/runs")
    begin = 1_790_000_000.0
    for index, (name, lr) in enumerate([("lr-small", 0.01), ("lr-middle", 0.03), ("lr-large", 0.1)]):
        run_dir(root, name, started=begin + 100 * index, lr=lr, steps=200)
    app = quiet_app()
    async with app.run_test(size=(120, 32)) as pilot:
        await show(pilot, HistoryScreen(now=lambda: begin + 1000, clocked=False))
        await pilot.press("space", "down", "space", "down", "space", "c")
        await rest(pilot)
        app.tick()
        await rest(pilot)
        await take(pilot)


@pytest.mark.parametrize("scene", [a_run, a_failed_run, a_launch, a_cluster, a_comparison])
@in_loop
async def test_the_pictures_of_the_readme_show_the_console_as_it_is(
    scene: Callable[[Callable[[Pilot[Any]], Awaitable[None]], Path], Awaitable[None]], folder: Path
) -> None:
    path = PICTURES / f"{scene.__name__.removeprefix('a_')}.svg"

    async def take(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        assert isinstance(pilot.app, GputrainApp)
        found = pilot.app.export_screenshot(title="gputrain")
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
        # Not compared with ==, whose report of a difference would be as long as the picture.
        same = found == path.read_text(encoding="utf-8")
        assert same, f"{path.name} is out of date: look at it after UPDATE_GOLDEN=1"

    await scene(take, folder)
