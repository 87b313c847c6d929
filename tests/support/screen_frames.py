"""Screens of the console on a run, as rows of text, without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import synthetic
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.live import LiveRun
from gputrain_tui.history.runs import Run

NOW = synthetic.BEGIN + 60
"""Where there is no step yet."""
AFTER_STEP_S = 0.2
"""From the last step to now: a run that goes on makes steps."""


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def console(run: Run | None, runs: Callable[[], list[Run]] = list, *, silent_s: float = AFTER_STEP_S) -> GputrainApp:
    """Return a console whose clock stands still, ``silent_s`` after the last step: ``settle`` moves it."""

    def follow(found: Run) -> LiveRun:
        live = LiveRun(found, now=lambda: live.state.step_time + silent_s if live.state.step_time else NOW)
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
