"""What a widget does in an app: repaint by the clock, follow keys and mouse, take the colours of the theme."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from run_in_memory import RunInMemory, run_in_memory
from textual import events
from textual.app import App, ComposeResult
from textual.message import Message
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import Static

from gputrain_tui.console.widgets.band_chart import BandChart
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.console.widgets.step_bars import StepBars
from trainer.contract.record import Step

Scenario = Callable[["WidgetsApp", Pilot[None]], Awaitable[None]]


class WidgetsApp(App[None]):
    def __init__(self, run: RunInMemory) -> None:
        super().__init__()
        self.time = 100.0
        self.grid = RankGrid(run, now=lambda: self.time, id="grid")
        self.charts = [BandChart(run, "loss"), StepBars(run), LatenessMap(run)]
        self.seen: list[Message] = []

    def compose(self) -> ComposeResult:
        yield self.grid
        yield from self.charts
        yield Static("below")

    def on_rank_grid_picked(self, message: RankGrid.Picked) -> None:
        self.seen.append(message)

    def on_rank_grid_opened(self, message: RankGrid.Opened) -> None:
        self.seen.append(message)


def play_scenario(scenario: Scenario, run: RunInMemory | None = None, size: tuple[int, int] = (100, 40)) -> None:
    async def play() -> None:
        app = WidgetsApp(run or run_in_memory(40, 30))
        async with app.run_test(size=size) as pilot:
            app.grid.focus()
            await pilot.pause()
            await scenario(app, pilot)

    asyncio.run(play())


def lines(grid: RankGrid) -> list[str]:
    return [grid.render_line(y).text for y in range(grid.size.height)]


def test_keys_move_the_cursor_and_scroll_with_it() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        await pilot.press("down")
        assert app.grid.selected_rank == 0
        await pilot.press("down", "j", "k")
        assert app.grid.selected_rank == 1
        await pilot.press("end")
        assert app.grid.selected_rank == 39
        assert "▸   39" in lines(app.grid)[-1]
        await pilot.press("pageup")
        assert 20 < app.grid.selected_rank < 39
        await pilot.press("home", "enter")
        assert [type(message) for message in app.seen][-1] is RankGrid.Opened
        assert app.seen[-1].rank == 0  # type: ignore[attr-defined]

    play_scenario(scenario)


def test_the_mouse_picks_sorts_and_scrolls() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        await pilot.click("#grid", offset=(10, 5))
        assert app.grid.selected_rank == 3
        titles = lines(app.grid)[1]
        await pilot.click("#grid", offset=(titles.index("loss"), 1))
        assert (app.grid.sort_key, app.grid.descending) == ("loss", True)
        await pilot.click("#grid", offset=(titles.index("loss"), 1))
        assert (app.grid.sort_key, app.grid.descending) == ("loss", False)
        app.grid.sort_by("rank", descending=False)
        first = first_rank(app)
        app.grid.post_message(events.MouseScrollDown(None, 1, 3, 0, 1, 0, False, False, False))
        await pilot.pause()
        assert first_rank(app) == first + 3

    def first_rank(app: WidgetsApp) -> int:
        return int(lines(app.grid)[2].strip("▸▲✗ ").split()[0])

    play_scenario(scenario)


def test_a_step_changes_the_line_of_its_rank_and_nothing_else_and_no_step_changes_nothing() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        app.grid.tick()
        before = strips(app.grid)
        app.grid.tick()
        assert strips(app.grid) == before
        run.apply(Step(time=900.0, rank=4, step=31, epoch=1, steps=1, samples=32, loss=0.5))
        app.grid.tick()
        changed = [y for y, (old, new) in enumerate(zip(before, strips(app.grid), strict=True)) if old != new]
        assert changed == [0, 6], "the title has the number of steps that the means are taken over"

    def strips(grid: RankGrid) -> list[Strip]:
        return [grid.render_line(y) for y in range(grid.size.height)]

    run = run_in_memory(40, 30)
    play_scenario(scenario, run)


def test_the_cursor_stays_on_its_rank_while_ranks_change_places() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        app.grid.sort_by("loss")
        await pilot.press("down", "down", "down")
        rank = app.grid.selected_rank
        assert rank is not None
        run.apply(Step(time=900.0, rank=rank, step=31, epoch=1, steps=1, samples=32, loss=0.001))
        app.time += 10
        app.grid.tick()
        assert app.grid.selected_rank == rank
        assert lines(app.grid)[-1].startswith("▸")

    run = run_in_memory(40, 30)
    play_scenario(scenario, run)


def test_a_filter_and_its_removal_keep_the_grid_in_bounds() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        await pilot.press("end")
        app.grid.set_filter("rank:0-1")
        assert [line.split()[0] for line in lines(app.grid)[2:4]] == ["0", "1"]
        app.grid.set_filter("")
        await pilot.press("end")
        assert app.grid.selected_rank == 39

    play_scenario(scenario)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "nord", "ansi-dark", "ansi-light"])
def test_every_theme_colours_every_role(theme: str) -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        app.theme = theme
        await pilot.pause()
        await pilot.press("down")
        for chart in app.charts:
            chart.selected_rank = 13
        await pilot.pause()
        for panel in (app.grid, *app.charts):
            for y in range(panel.size.height):
                assert panel.render_line(y).cell_length == panel.size.width

    play_scenario(scenario)


def test_charts_can_be_zoomed_smoothed_and_logarithmic() -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        chart = app.charts[0]
        assert isinstance(chart, BandChart)
        chart.show(scale="log", last=10, smoothing=10)
        await pilot.pause()
        head = chart.render_line(0).text
        assert "log" in head
        assert "last 10" in head
        assert "smooth over 10 steps" in head

    play_scenario(scenario)


@pytest.mark.parametrize("size", [(12, 4), (30, 10), (80, 24), (200, 60)])
def test_any_size_of_the_terminal_is_painted(size: tuple[int, int]) -> None:
    async def scenario(app: WidgetsApp, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(size[0] + 7, size[1] + 3)
        await pilot.pause()
        assert app.grid.size.width == size[0] + 7

    play_scenario(scenario, size=size)
