from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
import synthetic
from screen_frames import console, played, press, rows, settle

from gputrain_tui.console.panel_container import PANELS, PanelChoice, PanelName, arrange
from gputrain_tui.console.screens.rank import RankScreen, arrange_rank
from gputrain_tui.console.screens.run import RunScreen
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.console.widgets.stack_view import StackView
from gputrain_tui.history.runs import Run, write_status


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock of these screens is in UTC, and no theme of somebody's is taken up."""
    import time

    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    time.tzset()


def shown(screen: RunScreen) -> set[str]:
    return {child.id or "" for child in screen.query_one("#panels").children if child.display}


def two_ranks(root: Path) -> Run:
    return synthetic.run(root)


def straggler(root: Path) -> Run:
    return synthetic.run(root, name="bert", nodes=2, ranks_per_node=8, steps=120, straggler=5)


def failed(root: Path) -> Run:
    return synthetic.run(root, name="bert", nodes=2, ranks_per_node=8, steps=120, failed_rank=11, status="failed")


def finished(root: Path) -> Run:
    return synthetic.run(root, steps=500, status="finished")


# ------------------------------------------------------------------------------------------------- where panels stand


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 40, 1024])
@pytest.mark.parametrize("size", [(20, 6), (78, 21), (94, 40), (118, 37), (118, 25), (198, 57), (300, 90), (200, 20)])
def test_panels_never_overlap_and_stay_inside(ranks: int, size: tuple[int, int]) -> None:
    names: tuple[PanelName, ...] = ("loss", "findings", "ranks")
    for root_cause_lines, rendezvous, panel in product((0, 9), (False, True), names):
        placed = arrange(
            *size, PanelChoice(ranks=ranks, root_cause_lines=root_cause_lines, rendezvous=rendezvous, panel=panel)
        )
        assert placed
        for region in placed.values():
            assert region.right <= size[0]
            assert region.bottom <= size[1]
        for one, two in combinations(placed.values(), 2):
            assert not one.overlaps(two)
        assert ("root_cause" in placed) == bool(root_cause_lines)
        assert set(placed) <= {*PANELS, "root_cause", "rendezvous"}


def test_a_small_terminal_shows_the_table_and_one_panel() -> None:
    assert set(arrange(78, 21, PanelChoice(ranks=16, panel="bars"))) == {"ranks", "bars"}


def test_a_large_terminal_shows_everything_at_once() -> None:
    for ranks in (2, 16, 30, 1024):
        assert set(arrange(198, 57, PanelChoice(ranks=ranks))) == set(PANELS)


def test_a_middle_sized_terminal_shows_everything_of_few_ranks() -> None:
    assert set(arrange(118, 37, PanelChoice(ranks=2))) == set(PANELS)
    assert set(PANELS) - set(arrange(118, 37, PanelChoice(ranks=64, right="findings"))) == {"log"}


def test_a_table_that_fits_is_shown_whole() -> None:
    placed = arrange(118, 37, PanelChoice(ranks=8))
    assert placed["ranks"].height >= 10
    assert placed["ranks"].width == 118
    assert arrange(118, 37, PanelChoice(ranks=16))["ranks"].height == 19


def test_a_zoomed_panel_has_everything() -> None:
    assert set(arrange(118, 37, PanelChoice(ranks=2, panel="late", zoomed=True))) == {"late"}


@pytest.mark.parametrize("size", [(20, 6), (78, 21), (118, 37), (198, 57)])
@pytest.mark.parametrize("below", ["loss", "log", "stack"])
def test_panels_of_a_rank_never_overlap(size: tuple[int, int], below: str) -> None:
    placed = arrange_rank(*size, facts=8, below=below)
    for one, two in combinations(placed.values(), 2):
        assert not one.overlaps(two)
    assert below in placed


@pytest.mark.parametrize("place", ["run", "rank"])
@played
async def test_help_opens_and_closes_with_its_key(place: str, tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(120, 48)) as pilot:
        await settle(pilot)
        await press(pilot, *(["enter"] if place == "rank" else []), "question_mark")
        assert f"keys of the {place} screen" in "\n".join(rows(app))
        await press(pilot, "question_mark")
        assert app.place == place


# ------------------------------------------------------------------------------------------------------ what keys do


@played
async def test_keys_choose_the_panel_of_a_small_terminal_and_enlarge_it(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        assert shown(screen) == {"ranks", "loss"}
        for key, panel in (("g", "sync"), ("b", "bars"), ("h", "late"), ("f", "findings"), ("p", "log")):
            await press(pilot, key)
            assert shown(screen) == {"ranks", panel}
        await press(pilot, "escape", "l", "l")
        assert shown(screen) == {"loss"}
        await press(pilot, "escape")
        assert shown(screen) == {"ranks", "loss"}
        await press(pilot, "t")
        await press(pilot, "t")
        assert shown(screen) == {"ranks"}


@played
async def test_resizing_is_immediate(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        assert shown(screen) == {"ranks", "loss"}
        await pilot.resize_terminal(200, 60)
        await pilot.pause()
        assert shown(screen) == set(PANELS)
        assert all(len(row) == 200 for row in rows(app))


@played
async def test_a_finding_opens_with_advice_and_points_at_its_rank(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "f", "enter")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        assert screen.selected_rank == 5
        text = "\n".join(rows(app))
        assert "late ms 20.10" in text
        assert "more reading workers" in text
        await press(pilot, "enter", "down", "enter")
        assert "cheaper preprocessing" in "\n".join(rows(app))


@played
async def test_the_rank_that_failed_is_pointed_out(tmp_path: Path) -> None:
    app = console(failed(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        assert screen.selected_rank == 11
        assert any(row.lstrip().startswith("✗   11") for row in rows(app))


@played
async def test_a_run_that_failed_before_any_rank_spoke_says_why(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=0, status="failed")
    run.status.message = "node1 cannot be reached"
    write_status(run.dir, run.status)
    app = console(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        text = "\n".join(rows(app))
        assert "the run failed" in text
        assert "node1 cannot be reached" in text


@played
async def test_the_filter_is_checked_while_it_is_typed(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "slash", *"hots")
        await pilot.press("colon", "x")
        await settle(pilot)
        assert "no column 'hots'" in "\n".join(rows(app))
        await press(pilot, "escape", "slash", *"node001", "enter")
        grid = app.screen.query_one(RankGrid)
        assert grid.filter_text == "node001"
        assert grid.has_focus
        await press(pilot, "escape")
        assert grid.filter_text == ""


@played
async def test_quitting_while_a_filter_is_typed_types_a_letter(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "slash", "q")
        assert app.screen.query_one(RankGrid).filter_text == "q"


@played
async def test_stopping_asks_and_names_the_run(tmp_path: Path) -> None:
    run = two_ranks(tmp_path)
    app = console(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "S")
        assert f"Stop {run.id}?" in "\n".join(rows(app))
        await press(pilot, "enter")
        assert isinstance(app.screen, RunScreen)
        assert not app.workers


@played
async def test_a_run_that_is_over_cannot_be_stopped(tmp_path: Path) -> None:
    app = console(finished(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "S")
        assert isinstance(app.screen, RunScreen)


@played
async def test_the_next_rank_is_a_key_away(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "enter", "right", "right", "left", "left", "left")
        screen = app.screen
        assert isinstance(screen, RankScreen)
        assert screen.rank == 15
        await press(pilot, "escape")
        assert isinstance(app.screen, RunScreen)


@played
async def test_a_process_that_is_gone_gives_no_stack_and_is_not_signalled(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "enter", "k")
        assert app.screen.query_one(StackView).display
        assert "rank 0 runs on node000: send SIGQUIT to process 40000 there" in "\n".join(rows(app))


@played
async def test_charts_change_their_axis_window_and_smoothing(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, steps=300))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "y", "w", "w", "m")
        text = "\n".join(rows(app))
        assert "last 100" in text
        assert "smooth 0.6" in text


@played
async def test_ranks_can_be_sorted_while_the_table_is_not_to_be_seen(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(20, 5)) as pilot:
        await settle(pilot)
        grid = app.screen.query_one(RankGrid)
        await press(pilot, "h", "z")
        assert not grid.display
        before = grid.sort_key
        await press(pilot, "s", "r")
        assert grid.sort_key != before
        await pilot.resize_terminal(80, 24)
        await press(pilot, "z")
        assert grid.display


@played
async def test_the_footer_shows_the_keys_of_the_log_while_it_has_them_and_a_click_presses_them(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "/ Filter" in rows(app)[-1]
        await press(pilot, "o")
        assert "/ Search" in rows(app)[-1]
        await pilot.click(KeyBar, offset=(rows(app)[-1].index("Search"), 0))
        await settle(pilot)
        assert any("search the log" in row for row in rows(app))
        await press(pilot, "escape", "escape")
        assert "/ Filter" in rows(app)[-1]
