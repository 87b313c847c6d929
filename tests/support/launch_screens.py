"""The launch screen on a folder of its own: what tests of the form, the preflight and the pictures share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from screens_at_rest import quiet_app, settle, show
from textual.pilot import Pilot

from gputrain_tui import paths
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.launch import LaunchScreen

TEXT = """# A recipe with a comment.
name = "tiny"

[[cluster.nodes]]
cpu_ranks = 2           # here

[train]
task = "lm"
max_updates = 2
threads = 1
save_every_epochs = 0

[task]
data = "text.txt"       # beside it
context = 8
dim = 16
layers = 1
heads = 2
sample_bytes = 0
"""


def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with one recipe that can be launched, and work in it."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(TEXT)
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    return tmp_path


def fixed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder whose names, clock and place are the same for everybody; runs are kept below ``home``."""
    monkeypatch.setenv("GPUTRAIN_HOME", "home")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "runs_folder", lambda: Path("home/runs"))
    (tmp_path / "recipes").mkdir()
    return tmp_path


def two_recipes(folder: Path) -> Path:
    """Put a recipe for this machine and one for two nodes into a folder."""
    (folder / "recipes" / "tiny.toml").write_text(TEXT)
    (folder / "recipes" / "two_nodes.toml").write_text(
        TEXT.replace("cpu_ranks = 2 ", 'host = "10.0.0.1"\ngpus = 4\n\n[[cluster.nodes]]\nhost = "10.0.0.2"\ngpus = 2')
        .replace("tiny", "two-nodes")
        .replace("max_updates = 2", "max_updates = 20_000")
    )
    return folder


@asynccontextmanager
async def launching(
    size: tuple[int, int] = (140, 40), *, gpus: dict[str, tuple[int, ...]] | None = None
) -> AsyncIterator[tuple[GputrainApp, Pilot[int], LaunchScreen]]:
    """Open the launch screen on the recipes here, with GPUs that were chosen before."""
    app = quiet_app()
    async with app.run_test(size=size) as pilot:
        app.session.gpus = gpus or {}
        screen = LaunchScreen(settle_s=0)
        await show(pilot, screen)
        yield app, pilot, screen


async def put(pilot: Pilot[int], screen: LaunchScreen, key: str, value: str) -> None:
    """Change a field and have the recipe looked at."""
    assert screen.draft is not None
    screen.draft.set(key, value)
    screen._changed()
    await settle(pilot)
