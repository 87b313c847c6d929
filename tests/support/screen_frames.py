"""Screens of the console on a run, as rows of text, without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import synthetic
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.live_run import LiveRun

NOW = synthetic.BEGIN + 60
"""Time of the clock before the first step, Unix seconds."""
AFTER_STEP_S = 0.2
"""Seconds of the clock after the last step, of a run that is training."""


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def console(run: Run | None, runs: Callable[[], list[Run]] = list, *, silent_s: float = AFTER_STEP_S) -> GputrainApp:
    """Return a console whose clock is fixed at ``silent_s`` after the last step; only ``settle`` updates it."""

    def follow(found: Run) -> LiveRun:
        live = LiveRun(found, now=lambda: live.state.step_time + silent_s if live.state.step_time else NOW)
        while live.poll(60):
            pass  # reads all of it: the first frame must not depend on this machine's speed
        return live

    return GputrainApp(run, clocked=False, follow=follow, runs=runs)


async def settle(pilot: Pilot[Any]) -> None:
    """Read the record to its end and repaint the screen."""
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
    """Press keys, and settle after each of them."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def rows(app: GputrainApp) -> list[str]:
    """Return the rows of the screen as text."""
    # Textual's public API exports SVG only; the compositor's strips have the same content as text.
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]
