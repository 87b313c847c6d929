"""The pages of the console's help: the keys of the screen, then the topic of the screen or field, then the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic
from launch_screens import open_launch_screen, small_folder
from screen_frames import console, played, press, rows, settle
from textual.widgets import Markdown

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.help_topics import ORDER


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_folder(tmp_path, monkeypatch)


def title(app: GputrainApp) -> str:
    return str(app.screen.query_one("#help").border_title)


@played
async def test_the_pages_after_the_keys_are_the_topics_with_that_of_the_screen_first(folder: Path) -> None:
    app = console(synthetic.run(folder / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "question_mark")
        titles = [title(app)]
        for _ in range(len(ORDER) - 1):
            await press(pilot, "right")
            titles.append(title(app))
        assert titles[:2] == ["keys of the run screen", "help: numbers"]
        assert set(titles[1:-1]) == {f"help: {name}" for name in ORDER if name not in ("developers", "changelog")}
        assert titles[-1] == titles[0]
        await press(pilot, "left")
        assert title(app) == titles[-2]
        await press(pilot, "question_mark")
        assert not app.screen.query("#help")


@pytest.mark.parametrize("size", [(3, 3), (1, 1), (20, 5)])
@played
async def test_pages_are_turned_in_a_tiny_terminal(size: tuple[int, int], folder: Path) -> None:
    app = console(synthetic.run(folder / "runs", steps=5))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await press(pilot, "question_mark", "right", "right", "left")
        assert title(app) == "help: numbers"
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert any("own clock" in row for row in rows(app))


@played
async def test_with_the_findings_focused_the_topic_is_about_findings(folder: Path) -> None:
    app = console(synthetic.run(folder / "runs", name="bert", nodes=2, ranks_per_node=8, steps=120, straggler=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "f", "question_mark", "right")
        assert title(app) == "help: findings"
        assert any("A slow rank" in row for row in rows(app))


@pytest.mark.parametrize(
    ("key", "topic", "text"),
    [
        ("train.lr", "recipe", "Keys of [train]"),
        ("cluster.nodes[0].cpu_ranks", "recipe", "Keys of [[cluster.nodes]]"),
        ("task.data", "tasks", "Options of the built-in tasks"),
    ],
)
@played
async def test_on_a_field_the_topic_is_that_of_the_field_at_its_table(key: str, topic: str, text: str) -> None:
    async with open_launch_screen() as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to(key)
        await press(pilot, "question_mark", "right")
        await settle(pilot)
        assert title(app) == f"help: {topic}"
        assert any(text in row for row in rows(app)[:8])


@played
async def test_a_link_leads_to_its_topic(folder: Path) -> None:
    app = console(synthetic.run(folder / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "question_mark", "right")
        app.screen.query_one(Markdown).post_message(Markdown.LinkClicked(app.screen.query_one(Markdown), "findings.md"))
        await settle(pilot)
        await app.workers.wait_for_complete()
        await settle(pilot)
        assert title(app) == "help: findings"
