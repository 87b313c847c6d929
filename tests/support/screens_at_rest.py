"""Drive a screen of the console without a clock: await background work, and read the screen as rows of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps

from textual.pilot import Pilot
from textual.screen import Screen
from textual.worker import WorkerCancelled

from gputrain_tui.console.app import GputrainApp


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


def quiet_app() -> GputrainApp:
    return GputrainApp(clocked=False, runs=list)


async def settle(pilot: Pilot[int]) -> None:
    """Wait until all background work has ended and its messages are processed."""
    for _ in range(20):
        await pilot.pause()
        workers = [worker for worker in pilot.app.workers if not worker.is_finished]
        if not workers:
            return
        for worker in workers:
            with suppress(WorkerCancelled):
                await worker.wait()
    raise AssertionError(f"background work does not end: {list(pilot.app.workers)}")


async def open_screen(pilot: Pilot[int], screen: Screen[None]) -> None:
    await pilot.app.push_screen(screen)
    await settle(pilot)


def screen_text(app: GputrainApp) -> str:
    """Return the text of the screen, row by row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def toasts(app: GputrainApp) -> list[str]:
    """Return the notifications on the screen; the app must run with ``notifications``."""
    return [str(toast.render()) for toast in app.screen.query("Toast")]
