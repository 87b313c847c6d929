"""A question is answered by a person: what arrives faster than anybody types is no yes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import synthetic
from screen_frames import console, played, settle
from screens_at_rest import toasts
from textual import events
from textual.pilot import Pilot

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.confirm import LEAST_KEY_GAP_S, Confirm


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))


def stopping(notices: list[str]) -> int:
    """Count the notices of runs that the console stops."""
    return sum(text.startswith("stopping ") for text in notices)


async def send_keys_at_once(pilot: Pilot[int], text: str) -> None:
    """Send keys as the terminal's reader does with a paste that passes for keys: at once."""
    for character in text:
        pilot.app.post_message(events.Key(character, character))
    await settle(pilot)


async def send_keys(pilot: Pilot[int], text: str) -> GputrainApp:
    await settle(pilot)
    await send_keys_at_once(pilot, text)
    app = pilot.app
    assert isinstance(app, GputrainApp)
    return app


@played
async def test_pasted_text_that_passes_for_keys_opens_a_confirmation_and_does_not_answer_it(tmp_path: Path) -> None:
    for text in ("Sy", "Syyyyy"):
        app = console(synthetic.run(tmp_path, name="one"))
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await send_keys(pilot, text)
            assert isinstance(app.screen, Confirm), text
            assert any("too soon" in text for text in toasts(app))
            assert not any(text.startswith("stopping ") for text in toasts(app))


@played
async def test_after_a_moment_the_answer_counts_and_a_no_always_does(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, name="one"))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await send_keys(pilot, "Sn")
        assert not isinstance(app.screen, Confirm)
        await send_keys(pilot, "Sy")
        await asyncio.sleep(LEAST_KEY_GAP_S)  # the time without keys is what is tested
        await send_keys_at_once(pilot, "y")
        assert any(text.startswith("stopping ") for text in toasts(app))
