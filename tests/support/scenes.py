"""All scenes of the console, with the keys that lead to each, on a fixed folder, clock and host names."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, chdir, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import synthetic
from launch_screens import NOT_READY, TEXT, two_recipes, validate_on_fixed_machine
from machines import ANSWERS, NO_DRIVER, TWO_NODES, gpu, machine, open_several_hosts
from run_dirs import run_dir
from screen_frames import NOW, console, press, settle
from screens_at_rest import open_screen, settle as rest
from textual.pilot import Pilot

from gputrain_tui import paths
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.cluster_screen import ClusterScreen
from gputrain_tui.console.screens.history_screen import HistoryScreen
from gputrain_tui.console.screens.launch_screen import LaunchScreen
from gputrain_tui.console.screens.run_screen import RunScreen
from gputrain_tui.history.run_folders import Run
from gputrain_tui.recipe.build import build
from trainer.contract.record import NodeSample, RankSample

THEMES = {
    "dark": "textual-dark",
    "light": "textual-light",
    "ansi": "ansi-dark",
    "ansi-light": "ansi-light",
    "plain": "",
}
"""Textual theme by the name of a picture's theme; ``plain`` is the dark one with ``NO_COLOR``."""
RUNS = Path("home/runs")
T0 = 1_790_000_000.0
"""Start of the first run in a list, Unix seconds."""

Play = Callable[[Pilot[Any]], Awaitable[None]]


@dataclass(frozen=True)
class Scene:
    """State of the console to draw."""

    play: Play
    """Presses the keys that lead to the state after the start."""
    run: Callable[[], Run | None] = lambda: None
    """Writes the run to open; None for the console's first start."""
    theme: str = "dark"


@contextmanager
def fixed_place(folder: Path, theme: str) -> Iterator[None]:
    """Change into a folder with two recipes, with time zone UTC, a theme and separate user settings."""
    environ = {"GPUTRAIN_HOME": "home", "TZ": "UTC", "XDG_CONFIG_HOME": str(folder / "config")}
    environ |= {"TEXTUAL_THEME": THEMES[theme] or THEMES["dark"]} | ({"NO_COLOR": "1"} if theme == "plain" else {})
    with (
        chdir(folder),
        mock.patch.dict(os.environ, environ),
        mock.patch.object(paths, "runs_folder", return_value=RUNS),
    ):
        time.tzset()
        (folder / "recipes").mkdir()
        two_recipes(folder)
        yield
    time.tzset()


@asynccontextmanager
async def playing(scene: Scene, size: tuple[int, int]) -> Any:
    """Run the console and yield it in the state of a scene."""
    app = console(scene.run())
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(pilot)
        await settle(pilot)
        await scene.play(pilot)
        await pilot.pause()
        yield app


# Synthetic runs


def two_ranks() -> Run:
    return synthetic.run(RUNS)


def straggler() -> Run:
    return synthetic.run(RUNS, name="bert", nodes=2, ranks_per_node=8, steps=120, straggler=5)


def joining() -> Run:
    return synthetic.run(RUNS, name="bert", nodes=3, ranks_per_node=8, steps=0, joined=19, status="starting")


def failed() -> Run:
    return synthetic.run(RUNS, name="bert", nodes=2, ranks_per_node=8, steps=120, failed_rank=11, status="failed")


def alone() -> Run:
    return synthetic.run(RUNS, ranks_per_node=1)


def finished() -> Run:
    return synthetic.run(RUNS, steps=500, status="finished")


def three_nodes() -> Run:
    return synthetic.run(RUNS, name="bert", nodes=3, ranks_per_node=8, steps=420, total=1000, straggler=13)


def many_ranks() -> Run:
    """Return a run of 1,024 ranks with samples of all nodes and ranks."""
    run = synthetic.run(
        RUNS, name="llama-70b-pretrain", nodes=128, ranks_per_node=8, steps=6, total=60_000, straggler=379
    )
    for node in range(128):
        ranks = [RankSample(rank=8 * node + i, cpu_percent=99.0, rss_bytes=(5 + i) << 30) for i in range(8)]
        sample = NodeSample(time=NOW, node=node, host=f"node{node:03}", cpu_percent=91, memory_used_bytes=9 << 30,
                            memory_total_bytes=64 << 30, ranks=ranks)  # fmt: skip
        synthetic.write(run.dir.node_events(node), sample)
    return run


# Keys of the scenes


async def stay(pilot: Pilot[Any]) -> None:
    """Press no key."""


def keys(*names: str) -> Play:
    """Return a function that presses keys."""

    async def play(pilot: Pilot[Any]) -> None:
        await press(pilot, *names)

    return play


def zoomed(key: str) -> Play:
    """Return a function that presses a panel's key and zooms the panel."""

    async def play(pilot: Pilot[Any]) -> None:
        await press(pilot, key)
        assert isinstance(pilot.app.screen, RunScreen)
        if not pilot.app.screen.choice.zoomed:
            await press(pilot, "z")

    return play


async def history(pilot: Pilot[Any]) -> None:
    run_dir(RUNS, "slow", started=T0, lr=0.01)
    run_dir(RUNS, "fast", started=T0 + 100, lr=0.2, steps=80)
    run_dir(RUNS, "a-name-that-needs-all-the-room-there-is", started=T0 + 150, status="stopped", steps=7)
    run_dir(RUNS, "broken", started=T0 + 200, status="failed", message="rank 1 ran out of memory in backward")
    await open_screen(pilot, HistoryScreen(now=lambda: T0 + 1000, clocked=False))
    await pilot.press("end", "space", "up", "space", "home")
    await rest(pilot)


async def history_empty(pilot: Pilot[Any]) -> None:
    await open_screen(pilot, HistoryScreen(clocked=False))


async def compare(pilot: Pilot[Any]) -> None:
    await history(pilot)
    await pilot.press("c")
    await rest(pilot)
    assert isinstance(pilot.app, GputrainApp)
    pilot.app.tick()
    await rest(pilot)


async def cluster(pilot: Pilot[Any]) -> None:
    gpus = [gpu(index, busy=index < 3, hot=index == 2) for index in range(8)]
    await open_screen(pilot, ClusterScreen(take=lambda: machine(*gpus), runs=list, clocked=False))
    await pilot.press("end", "space", "home")
    await rest(pilot)


async def cluster_without_gpus(pilot: Pilot[Any]) -> None:
    await open_screen(pilot, ClusterScreen(take=lambda: machine(note=NO_DRIVER), runs=list, clocked=False))


async def cluster_recipe(pilot: Pilot[Any]) -> None:
    assert isinstance(pilot.app, GputrainApp)
    pilot.app.session.recipe = build(TWO_NODES, name="two_nodes.toml")
    screen = ClusterScreen(
        take=lambda: machine(note=NO_DRIVER), survey=ANSWERS.__getitem__, runs=list, clocked=False, now=lambda: 100.0
    )
    await open_screen(pilot, screen)


async def cluster_hosts(pilot: Pilot[Any]) -> None:
    await open_several_hosts(pilot, Path())


async def cluster_silent(pilot: Pilot[Any]) -> None:
    await open_several_hosts(pilot, Path())
    await pilot.press("end")
    await rest(pilot)


async def launch(pilot: Pilot[Any]) -> None:
    await open_screen(pilot, LaunchScreen(debounce_s=0, validate=validate_on_fixed_machine))
    await pilot.press("down")
    await rest(pilot)


async def launch_not_ready(pilot: Pilot[Any]) -> None:
    for path in Path("recipes").iterdir():
        path.unlink()
    Path("recipes/books.toml").write_text(
        TEXT.replace("tiny", "books")
        .replace("text.txt", "data/books")
        .replace("threads", 'save_dir = "/scratch/ours"\nthreads')
    )
    screen = LaunchScreen(debounce_s=0, validate=partial(validate_on_fixed_machine, facts=NOT_READY))
    await open_screen(pilot, screen)
    screen.form.focus()
    screen.form.go_to("task.data")
    await rest(pilot)


async def launch_editing(pilot: Pilot[Any]) -> None:
    screen = LaunchScreen(debounce_s=0, validate=validate_on_fixed_machine)
    await open_screen(pilot, screen)
    assert screen.draft is not None
    screen.draft.set("train.batch_size", "1, 2, 3")
    screen.form.focus()
    screen.form.go_to("train.lr")
    await pilot.press("enter", *"fast")
    await rest(pilot)


SCENES = {
    "run_two_ranks": Scene(stay, two_ranks),
    "run_straggler": Scene(stay, straggler),
    "run_joining": Scene(stay, joining),
    "run_failed": Scene(stay, failed),
    "run_finished": Scene(stay, finished),
    "run_alone": Scene(stay, alone),
    "run_many": Scene(stay, many_ranks),
    "run_no_color": Scene(stay, straggler, theme="plain"),
    "run_filtered": Scene(keys("slash", *"host:node001", "enter"), straggler),
    "run_filter_line": Scene(keys("slash", *"loss<"), straggler),
    "run_findings": Scene(zoomed("f"), straggler),
    "run_log": Scene(zoomed("o"), straggler),
    "run_bars": Scene(zoomed("b"), straggler),
    "run_late": Scene(zoomed("h"), straggler),
    "run": Scene(keys(*["down"] * 14), three_nodes),
    "rank": Scene(keys("down", "down", "enter"), straggler),
    "rank_failed": Scene(keys("enter"), failed),
    "help": Scene(keys("question_mark"), straggler),
    "confirm": Scene(keys("S"), straggler),
    "palette": Scene(keys("ctrl+p"), straggler),
    "toast": Scene(keys("S"), failed),
    "history": Scene(history),
    "history_empty": Scene(history_empty),
    "compare": Scene(compare),
    "cluster": Scene(cluster),
    "cluster_without_gpus": Scene(cluster_without_gpus),
    "cluster_recipe": Scene(cluster_recipe),
    "cluster_hosts": Scene(cluster_hosts),
    "cluster_silent": Scene(cluster_silent),
    "launch": Scene(launch),
    "launch_not_ready": Scene(launch_not_ready),
    "launch_editing": Scene(launch_editing),
}
