from __future__ import annotations

from pathlib import Path

import pytest
from launch_screens import fixed_folder, two_recipes
from run_dirs import run_dir
from screen_frames import SIZES, assert_screen
from screens_at_rest import in_loop, quiet_app, settle, show

from gputrain_tui.console.screens.history import HistoryScreen

T0 = 1_790_000_000.0
SIZED = pytest.mark.parametrize("size", SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return two_recipes(fixed_folder(tmp_path, monkeypatch))


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
