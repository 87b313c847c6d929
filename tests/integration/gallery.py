"""Every screen of the console as a picture, at each size and in each theme, to be looked at before it is called done.

``python tests/console/gallery.py OUT [SCENE…] [--size 80x24] [--theme dark]`` writes ``OUT/<scene>_<size>_<theme>.svg``
and, where chromium is installed, a PNG beside each. Without a scene it takes all of them, without a size or theme
likewise. A scene is a function here; its name is the picture's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import synthetic
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from run_dirs import run_dir
from screen_frames import NOW, SIZES, console, press
from screen_frames import settle as paint
from screens_at_rest import settle as rest
from screens_at_rest import show
from textual.pilot import Pilot

from gputrain_tui import paths
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.history import HistoryScreen
from gputrain_tui.console.screens.rank import RankScreen
from gputrain_tui.console.screens.run import RunScreen
from gputrain_tui.console.widgets.stack_view import StackView
from gputrain_tui.history.runs import Run
from trainer.contract.record import NodeSample, RankSample

THEMES = {
    "dark": "textual-dark",
    "light": "textual-light",
    "ansi": "ansi-dark",
    "ansi-light": "ansi-light",
    "plain": "",
}
"""Name of a picture's theme to Textual's; ``plain``: what ``NO_COLOR`` leaves of the dark one."""
CELL = (12.2, 24.4)
"""Pixels of one character in a picture."""
FRAME = (20, 60)
"""Pixels around the characters."""
MORE_S = 120
"""The longest that chromium may take for one picture."""


@dataclass(frozen=True)
class Scene:
    """Something to be seen in the console."""

    play: Callable[[Pilot[Any]], Awaitable[None]]
    """Brings the console there once it has started."""
    run: Callable[[], Run | None] = lambda: None
    """Which run is opened; none: the first start."""


@cache
def synthetic_run(**wishes: Any) -> Run:
    """Return a run that never ran, written once."""
    return synthetic.run(Path("home/runs"), **wishes)


def two() -> Run:
    return synthetic_run(name="demo", steps=300)


def bert() -> Run:
    return synthetic_run(name="bert", nodes=3, ranks_per_node=8, steps=300, total=1000, straggler=13)


def failed() -> Run:
    return synthetic_run(name="bert", nodes=2, ranks_per_node=8, steps=120, culprit=11, status="failed")


def joining() -> Run:
    return synthetic_run(name="bert", nodes=3, ranks_per_node=8, steps=0, joined=19, status="starting")


@cache
def many() -> Run:
    """1,024 ranks on hosts whose names take room, with every sample that there can be."""
    run = synthetic_run(name="llama-70b-pretrain", nodes=128, ranks_per_node=8, steps=24, total=60_000, straggler=379)
    for node in range(128):
        ranks = [RankSample(rank=8 * node + i, cpu_percent=99.0, rss_bytes=(5 + i) << 30) for i in range(8)]
        sample = NodeSample(time=NOW, node=node, host=f"node{node:03}", cpu_percent=91, memory_used_bytes=9 << 30,
                            memory_total_bytes=64 << 30, ranks=ranks)  # fmt: skip
        synthetic.write(run.dir.node_events(node), sample)
    return run


async def stay(pilot: Pilot[Any]) -> None:
    await paint(pilot)


def keys(*names: str) -> Callable[[Pilot[Any]], Awaitable[None]]:
    async def play(pilot: Pilot[Any]) -> None:
        await press(pilot, *names)

    return play


def zoomed(key: str) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Press a panel's key until it has the screen: it is shown already where there is room."""

    async def play(pilot: Pilot[Any]) -> None:
        await press(pilot, key)
        assert isinstance(pilot.app.screen, RunScreen)
        if not pilot.app.screen.wish.zoomed:
            await press(pilot, "z")

    return play


async def with_stack(pilot: Pilot[Any]) -> None:
    assert isinstance(pilot.app.screen, RunScreen)
    pilot.app.screen.open_rank(13)
    await paint(pilot)
    screen = pilot.app.screen
    assert isinstance(screen, RankScreen)
    screen._below = "stack"
    screen._arrange()
    frames = [
        ("trainer/loop.py", 212, "_step"),
        ("torch/_tensor.py", 647, "backward"),
        ("torch/autograd/graph.py", 829, "_engine_run_backward"),
    ]
    lines = ["Thread 0x00007f31 (most recent call first):"]
    lines += [f'  File "{file}", line {line} in {name}' for file, line, name in reversed(frames)]
    screen.query_one(StackView).show(lines, "rank 13 at 12:00:00")
    await paint(pilot)


async def history(pilot: Pilot[Any]) -> None:
    root = Path("home/runs")
    begin = 1_790_000_000.0
    kept = [
        run_dir(root, "slow", started=begin, lr=0.01),
        run_dir(root, "fast", started=begin + 100, lr=0.2, steps=80),
        run_dir(root, "a-name-that-needs-all-the-room-there-is", started=begin + 150, status="stopped", steps=7),
        run_dir(root, "broken", started=begin + 200, status="failed", message="rank 1 ran out of memory in backward"),
        run_dir(root, "middle", started=begin + 300, lr=0.05, steps=60),
    ]
    await show(pilot, HistoryScreen(runs=lambda: (kept[::-1], []), now=lambda: begin + 1000, clocked=False))
    await pilot.press("end", "space", "up", "space", "home")
    await rest(pilot)
    tick(pilot)
    await rest(pilot)


async def no_history(pilot: Pilot[Any]) -> None:
    await show(pilot, HistoryScreen(runs=lambda: ([], []), clocked=False))


async def comparison(pilot: Pilot[Any]) -> None:
    await history(pilot)
    await pilot.press("space", "c")
    await rest(pilot)
    tick(pilot)
    await rest(pilot)


def tick(pilot: Pilot[Any]) -> None:
    assert isinstance(pilot.app, GputrainApp)
    pilot.app.tick()


async def cluster(pilot: Pilot[Any]) -> None:
    from test_cluster_screen import gpu, machine

    from gputrain_tui.console.screens.cluster import ClusterScreen

    gpus = [gpu(index, busy=index < 3, hot=index == 2) for index in range(8)]
    await show(pilot, ClusterScreen(take=lambda: machine(*gpus), runs=list, clocked=False))


async def cluster_hosts(pilot: Pilot[Any]) -> None:
    from test_cluster_frames import several

    with tempfile.TemporaryDirectory() as folder:
        await several(pilot, Path(folder))


async def cluster_silent(pilot: Pilot[Any]) -> None:
    await cluster_hosts(pilot)
    await pilot.press("end")


async def cluster_without_gpus(pilot: Pilot[Any]) -> None:
    from test_cluster_screen import machine

    from gputrain_tui.console.screens.cluster import ClusterScreen

    note = "no NVIDIA driver on this machine; CPU ranks work"
    await show(pilot, ClusterScreen(take=lambda: machine(note=note), runs=list, clocked=False))


async def launch(pilot: Pilot[Any]) -> None:
    from test_launch_frames import examined
    from test_whole_screens import RECIPE

    from gputrain_tui.console.screens.launch import LaunchScreen

    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/two_nodes.toml").write_text(RECIPE)
    await show(pilot, LaunchScreen(settle_s=0, examine=examined))


SCENES: dict[str, Scene] = {
    "welcome": Scene(stay),
    "run": Scene(keys(*["down"] * 14), bert),
    "run_two": Scene(stay, two),
    "run_alone": Scene(stay, lambda: synthetic_run(name="alone", ranks_per_node=1)),
    "run_joining": Scene(stay, joining),
    "run_failed": Scene(stay, failed),
    "run_finished": Scene(stay, lambda: synthetic_run(steps=500, status="finished")),
    "run_many": Scene(stay, many),
    "run_many_late": Scene(zoomed("h"), many),
    "run_filtered": Scene(keys("slash", *"host:node001", "enter"), bert),
    "run_filter_line": Scene(keys("slash", *"loss<"), bert),
    "run_findings": Scene(zoomed("f"), bert),
    "run_log": Scene(zoomed("o"), bert),
    "run_bars": Scene(zoomed("b"), bert),
    "run_late": Scene(zoomed("h"), bert),
    "run_failed_late": Scene(zoomed("h"), failed),
    "rank": Scene(keys("down", "down", "enter"), bert),
    "rank_failed": Scene(keys("enter"), failed),
    "rank_stack": Scene(with_stack, bert),
    "help": Scene(keys("question_mark"), bert),
    "confirm": Scene(keys("S"), bert),
    "palette": Scene(keys("ctrl+p"), bert),
    "toast": Scene(keys("S"), failed),
    "history": Scene(history),
    "history_empty": Scene(no_history),
    "compare": Scene(comparison),
    "cluster": Scene(cluster),
    "cluster_hosts": Scene(cluster_hosts),
    "cluster_silent": Scene(cluster_silent),
    "cluster_without_gpus": Scene(cluster_without_gpus),
    "launch": Scene(launch),
}


@contextmanager
def calm(folder: Path, theme: str) -> Iterator[None]:
    """Names, clock and theme are the same for everybody; the person's own settings are not touched."""
    kept = {"GPUTRAIN_HOME": "home", "TZ": "UTC", "XDG_CONFIG_HOME": str(folder / "config")}
    kept |= {"TEXTUAL_THEME": THEMES[theme] or THEMES["dark"]} | ({"NO_COLOR": "1"} if theme == "plain" else {})
    with chdir(folder), mock.patch.dict(os.environ, kept):
        time.tzset()
        yield
    time.tzset()


async def picture(scene: Scene, size: tuple[int, int], theme: str) -> str:
    """Return a scene as SVG; colours that are the terminal's own as a light terminal has them, for its theme."""
    app = console(scene.run())
    async with app.run_test(size=size, notifications=True) as pilot:
        await paint(pilot)
        await paint(pilot)
        await scene.play(pilot)
        await pilot.pause()
        if theme != "ansi-light":
            return app.export_screenshot(title="gputrain")
        with mock.patch("rich.console.SVG_EXPORT_THEME", DEFAULT_TERMINAL_THEME):
            return app.export_screenshot(title="gputrain")


def png(svg: Path, size: tuple[int, int]) -> None:
    """Turn a picture into one that every viewer opens, where chromium is installed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return
    wide, high = (round(cells * cell + frame) for cells, cell, frame in zip(size, CELL, FRAME, strict=True))
    with tempfile.TemporaryDirectory() as profile:
        words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                 "--disable-background-networking", "--disable-sync", "--disable-component-update", "--hide-scrollbars",
                 f"--screenshot={svg.with_suffix('.png')}", f"--window-size={wide},{high}", str(svg)]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, timeout=MORE_S)


def main() -> None:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--theme", action="append", choices=THEMES)
    parser.add_argument("--svg", action="store_true", help="leave the PNGs out")
    args = parser.parse_args()
    for name in args.scenes:
        if name not in SCENES:
            parser.error(f"{name!r} is not one of {', '.join(SCENES)}")
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(paths, "runs_folder", return_value=Path("home/runs")),
    ):
        for name in args.scenes or SCENES:
            for size in args.size or SIZES:
                for theme in args.theme or THEMES:
                    with calm(Path(folder), theme):
                        found = asyncio.run(picture(SCENES[name], SIZES[size], theme))
                    svg = out / f"{name}_{size}_{theme}.svg"
                    svg.write_text(found, encoding="utf-8")
                    if not args.svg:
                        png(svg, SIZES[size])
                    print(svg)


if __name__ == "__main__":
    main()
