"""Screens as rows of text, compared with files: what the golden frames of the console share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import synthetic
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.live import LiveRun
from gputrain_tui.history.runs import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "screens"
SIZES = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
NOW = synthetic.BEGIN + 60


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def console(run: Run | None, runs: Callable[[], list[Run]] = list) -> GputrainApp:
    """Return a console whose clock stands still: ``settle`` moves it."""

    def follow(found: Run) -> LiveRun:
        live = LiveRun(found, now=lambda: NOW)
        while live.poll(60):
            pass  # a first frame that does not depend on how fast this machine is
        return live

    return GputrainApp(run, clocked=False, follow=follow, runs=runs)


async def settle(pilot: Pilot[Any]) -> None:
    """Read the record to its end and paint what came of it."""
    app = pilot.app
    assert isinstance(app, GputrainApp)
    while app.live is not None and app.live.poll():
        pass
    await pilot.pause()
    repaint = getattr(app.screen, "repaint", None)
    if repaint is not None:
        repaint()
    await pilot.pause()


async def press(pilot: Pilot[Any], *keys: str) -> None:
    """Press keys one after the other, each seen before the next."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def rows(app: GputrainApp) -> list[str]:
    """Return what is on the screen."""
    # The public way to a picture is SVG; the compositor's strips are the same as text.
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def assert_screen(name: str, app: GputrainApp) -> None:
    """Compare a screen with ``<name>.txt``; written anew when ``UPDATE_GOLDEN`` is set."""
    found = "".join(f"{row.rstrip()}\n" for row in rows(app))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
