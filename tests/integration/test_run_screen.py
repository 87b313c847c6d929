from __future__ import annotations

import math
import random
import re
from argparse import Namespace
from itertools import combinations, product
from pathlib import Path
from typing import Literal

import pytest
import synthetic
from manual_clock import ManualClock
from msgspec.structs import replace
from screen_frames import NOW, console, played, press, rows, settle
from screens_at_rest import toasts

from gputrain_tui import paths
from gputrain_tui.commands import runs as runs_command
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.panel_container import PANELS, PanelChoice, PanelName, arrange
from gputrain_tui.console.screens import stacks_screen
from gputrain_tui.console.screens.rank_screen import RankScreen, arrange_rank
from gputrain_tui.console.screens.run_screen import RunScreen
from gputrain_tui.console.widgets.band_chart import BandChart
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.overlay_chart import CurveReader
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.history.record_tail import last_steps
from gputrain_tui.history.run_folders import Run, list_runs, open_run
from gputrain_tui.history.status_file import write_status
from gputrain_tui.history.summary import summarize
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.state.step_losses import loss_at
from trainer.contract.record import (
    Checkpoint,
    CodeFrame,
    CollectiveGroup,
    Doing,
    Finding,
    RankStacks,
    RunStatusName,
    Step,
    ThreadStack,
    encode_event,
    read_stack_request,
)


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock of these screens is in UTC, and no saved theme is loaded."""
    import time

    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    time.tzset()


def visible_panels(screen: RunScreen) -> set[str]:
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


@pytest.mark.parametrize(
    ("size", "ranks", "panel", "names"),
    [
        ((58, 15), 16, "loss", {"loss"}),
        ((58, 15), 16, "bars", {"bars"}),
        ((78, 21), 16, "loss", {"loss", "findings"}),
        ((78, 21), 16, "bars", {"loss", "bars"}),
        ((78, 21), 16, "log", {"log"}),
        ((78, 21), 2, "loss", {"loss", "findings"}),
        ((118, 21), 16, "loss", {"loss", "sync", "findings"}),
        ((198, 21), 16, "loss", {"loss", "sync", "findings"}),
        ((118, 27), 2, "loss", {*PANELS} - {"ranks"}),
        ((118, 27), 16, "loss", {*PANELS} - {"ranks", "log"}),
        ((78, 57), 1024, "loss", {"loss", "sync", "findings", "log"}),
        ((58, 57), 16, "late", {"loss", "sync", "findings", "late"}),
    ],
)
def test_small_and_odd_terminals_show_as_many_panels_as_can_be_read(
    size: tuple[int, int], ranks: int, panel: PanelName, names: set[str]
) -> None:
    placed = arrange(*size, PanelChoice(ranks=ranks, panel=panel))
    assert set(placed) == {"ranks", *names}
    for name, region in placed.items():
        assert region.height >= 3, name
        assert region.width >= 38, name


def test_panels_of_a_tall_narrow_terminal_stand_above_each_other() -> None:
    placed = arrange(78, 57, PanelChoice(ranks=64))
    assert {region.width for region in placed.values()} == {78}
    assert sum(region.height for region in placed.values()) == 57


def test_the_findings_use_the_space_beside_the_table() -> None:
    placed = arrange(198, 52, PanelChoice(ranks=8, table_cells=130))
    assert placed["ranks"].y == placed["findings"].y == 0
    assert placed["ranks"].width >= 130
    assert placed["findings"].right == 198
    assert set(placed) == set(PANELS)


def test_the_findings_stand_below_a_table_of_few_lines_where_they_have_more_space() -> None:
    placed = arrange(198, 52, PanelChoice(ranks=2, table_cells=130))
    assert placed["ranks"].width == 198
    assert placed["findings"].y > placed["ranks"].bottom
    assert placed["findings"].width > 90
    assert set(placed) == set(PANELS)


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
@pytest.mark.parametrize("below", ["loss", "log", "groups"])
@pytest.mark.parametrize("in_groups", [True, False])
def test_panels_of_a_rank_never_overlap(size: tuple[int, int], below: str, in_groups: bool) -> None:
    placed = arrange_rank(*size, facts=8, below=below, in_groups=in_groups)
    for one, two in combinations(placed.values(), 2):
        assert not one.overlaps(two)
    assert below in placed


def test_a_rank_shows_as_many_panels_as_can_be_read() -> None:
    def placed(width: int, height: int, below: str, *, in_groups: bool = False) -> set[str]:
        return set(arrange_rank(width, height, facts=8, below=below, in_groups=in_groups))

    assert placed(58, 15, "loss") == {"facts", "loss"}
    assert placed(78, 21, "sync") == {"facts", "loss", "sync"}
    assert placed(78, 21, "groups") == {"facts", "groups"}
    assert placed(198, 57, "loss") == {"facts", "loss", "sync", "step", "log"}
    assert placed(198, 57, "loss", in_groups=True) == {"facts", "loss", "sync", "step", "log", "groups"}
    assert placed(118, 21, "loss") == {"facts", "loss", "sync", "step"}
    assert placed(78, 57, "groups") == {"facts", "loss", "sync", "step", "groups"}


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
        assert visible_panels(screen) == {"ranks", "loss", "findings"}
        for key, panel in (("g", "sync"), ("b", "bars"), ("h", "late")):
            await press(pilot, key)
            assert visible_panels(screen) == {"ranks", "loss", panel}
        await press(pilot, "o")
        assert visible_panels(screen) == {"ranks", "log"}
        await press(pilot, "escape", "l", "l")
        assert visible_panels(screen) == {"loss"}
        await press(pilot, "escape")
        assert visible_panels(screen) == {"ranks", "loss", "sync"}  # the findings gave way to the log
        await press(pilot, "t")
        await press(pilot, "t")
        assert visible_panels(screen) == {"ranks"}


@played
async def test_a_finding_that_does_not_fit_is_opened_on_the_whole_screen(tmp_path: Path) -> None:
    run = two_ranks(tmp_path)
    message = "rank 1 has done no step for more than 10 s; " + "its last collectives are all_reduce 63 of [4160]; " * 9
    finding = Finding(time=NOW, kind="stalled", rank=1, severity="critical", message=message,
                      evidence={"silent_s": 10.5}, advice="look at its stack")  # fmt: skip
    synthetic.write(run.dir.run_events, finding)
    app = console(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "f", "enter")
        text = "\n".join(rows(app))
        assert visible_panels(app.screen) == {"findings"}
        for words in ("has done no step", "silent s 10.50", "look at its stack"):
            assert words in text
        await press(pilot, "enter", "escape")
        assert visible_panels(app.screen) == {"ranks", "loss", "findings"}


@played
async def test_resizing_is_immediate(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        assert visible_panels(screen) == {"ranks", "loss", "sync"}
        await pilot.resize_terminal(200, 60)
        await pilot.pause()
        assert visible_panels(screen) == set(PANELS)
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
        assert "excess ms 20.10" in text
        assert "more loader workers" in text
        await press(pilot, "enter", "down", "enter")
        assert "cheaper" in "\n".join(rows(app))


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


@pytest.mark.parametrize("outcome", ["finished", "failed"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@played
async def test_a_run_that_ended_is_never_shown_as_going_on_while_its_record_is_read(
    outcome: RunStatusName, size: tuple[int, int], tmp_path: Path
) -> None:
    run = synthetic.run(tmp_path, steps=2000, status=outcome, failed_rank=1 if outcome == "failed" else None)
    message = "rank 1 failed" if outcome == "failed" else None
    write_status(run.dir, replace(run.status, status=outcome, message=message, step=2000, loss=1.25))
    ended = open_run(run.dir.path)
    assert ended is not None
    clock = ManualClock(100.0, tick=1.0)  # each poll reads one portion
    app = GputrainApp(ended, clocked=False, follow=lambda found: LiveRun(found, clock=clock), runs=list)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        live, portions = app.live, 0
        assert live is not None
        while not live.caught_up:
            await pilot.pause()
            repaint(app)
            await pilot.pause()
            screen = "\n".join(rows(app))
            assert outcome in rows(app)[0]
            assert "reading the record" in rows(app)[0]
            assert rows(app)[1].split() == ["step", "2,000", "loss", "1.2500"]
            for wrong in ("running", "training", "waiting", "Stop", "no findings", "nothing was found", "nothing to"):
                assert wrong not in screen
            assert ("failed in step" in screen, "launch" in screen) == (False, False)
            live.poll()
            portions += 1
        assert portions > 1
        await settle(pilot)
        assert "reading" not in rows(app)[0]
        assert ("failed in step" in "\n".join(rows(app))) == (outcome == "failed")


def repaint(app: GputrainApp) -> None:
    assert isinstance(app.screen, RunScreen)
    app.screen.repaint()


@played
async def test_a_run_that_failed_before_its_first_event_shows_the_reason(tmp_path: Path) -> None:
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
async def test_a_key_shows_one_rank_of_each_process_group_by_name_and_then_all(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, ranks_per_node=4, steps=40)
    for rank, (tp, dp) in enumerate((([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3]))):
        for name, ranks in (("tp", tp), ("dp", dp), ("world", [0, 1, 2, 3])):
            synthetic.write(run.dir.rank_events(rank), CollectiveGroup(time=NOW, rank=rank, name=name, ranks=ranks))
    app = console(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        heads = []
        for _ in range(3):
            await press(pilot, "U")
            heads.append(next(line for line in rows(app) if "ranks 4" in line))
        assert ["one of each tp  2" in head for head in heads] == [True, False, False]
        assert ["one of each dp  2" in head for head in heads] == [False, True, False]
    app = console(two_ranks(tmp_path / "whole"))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        await press(pilot, "U")
        assert toasts(app) == ["no process group is of several ranks but not of all"]


@played
async def test_quitting_while_a_filter_is_typed_types_a_letter(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "slash", "q")
        assert app.screen.query_one(RankGrid).filter_text == "q"


@played
async def test_stopping_needs_a_confirmation_that_names_the_run(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "deleted"])
@played
async def test_resume_is_offered_only_where_a_checkpoint_is(kept: bool, tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, status="stopped")
    saved = run.dir.checkpoints / "step_300.pt"
    synthetic.write(run.dir.rank_events(0), Checkpoint(time=1.0, step=300, path=str(saved), bytes=1, write_ms=1.0))
    if kept:
        saved.write_bytes(b"1")
    app = console(run)
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        whole = "\n".join(rows(app))
        assert ("r Resume" in whole) == kept
        assert ("resumes from its checkpoint" in whole) == kept


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
async def test_a_screen_that_was_opened_just_now_is_painted_once_it_has_panels(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, RunScreen)
        app.push_screen(RankScreen(app.screen.live, 1))
        assert not app.screen.children
        app.tick()
        await settle(pilot)
        assert "rank 1" in "\n".join(rows(app))


@played
async def test_the_stack_of_a_rank_is_asked_for_and_shown_when_it_is_in_the_record(tmp_path: Path) -> None:
    app = console(run := straggler(tmp_path))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "enter", "K")
        assert "0 of 1 have answered" in "\n".join(rows(app))
        request = read_stack_request(run.dir)
        with run.dir.node_events(0).open("ab") as file:
            for rank, function in enumerate(("augment", "other")):
                thread = ThreadStack("MainThread", [CodeFrame("train.py", 8, function, True)])
                file.write(encode_event(RankStacks(time=NOW, rank=rank, request=request, threads=[thread])))
        await settle(pilot)
        text = "\n".join(rows(app))
        assert "train.py:8 in augment" in text
        assert "other" not in text
        await press(pilot, "escape")
        assert isinstance(app.screen, RankScreen)


@played
async def test_the_stacks_screen_says_who_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks_screen, "TIMEOUT_S", 0.0)
    app = console(run := straggler(tmp_path))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "K")
        assert "no answer from ranks 0 to " in "\n".join(rows(app))
        thread = ThreadStack("MainThread", [CodeFrame("train.py", 8, "augment", True)])
        with run.dir.node_events(0).open("ab") as file:
            for rank in range(15):
                request = read_stack_request(run.dir)
                host = f"h{rank // 8}"
                file.write(encode_event(RankStacks(time=NOW, rank=rank, host=host, request=request, threads=[thread])))
        await settle(pilot)
        text = "\n".join(rows(app))
        assert "no answer from rank 15" in text
        assert "ranks 0 to 14 on h0, h1: train.py:8 in augment" in text


@played
async def test_charts_change_their_axis_window_and_smoothing(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, steps=300))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "y", "w", "w", "m")
        text = "\n".join(rows(app))
        assert "last 100" in text
        assert text.count("smooth over 10 steps") == 2, "of the loss and of the wait"


@played
async def test_a_cursor_reads_the_values_of_a_step_in_every_chart(tmp_path: Path) -> None:
    app = console(straggler(tmp_path))
    async with app.run_test(size=(200, 55)) as pilot:
        await settle(pilot)
        await press(pilot, "full_stop")
        heads = [row for row in rows(app) if "step 120" in row and "in " in row]
        assert any("loss  step 120" in row for row in heads)
        assert any("sync wait ms  step 120" in row for row in heads)
        await press(pilot, "comma", "less_than_sign")
        (cursor,) = {match for row in rows(app) for match in re.findall(r"(?:loss|ms)  step (\d+)", row)}
        assert 80 < int(cursor) < 120
        await press(pilot, "escape")
        assert not any(re.search(r"loss  step \d", row) for row in rows(app))


@played
async def test_charts_zoom_into_steps_and_back(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, steps=300))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "plus", "plus")
        assert "steps 226–300" in "\n".join(rows(app))
        await press(pilot, "minus")
        assert "steps 188–337" not in "\n".join(rows(app))
        await press(pilot, "minus")
        assert "steps 1" not in "\n".join(row for row in rows(app) if "loss" in row)


@played
async def test_the_mouse_puts_the_cursor_and_drags_a_range(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, steps=300))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        chart = app.screen.query_one("#loss", BandChart)
        await pilot.click("#loss", offset=(20, 4))
        await settle(pilot)
        assert chart.view.cursor is not None
        assert chart.view.span is None
        await pilot.mouse_down("#loss", offset=(20, 4))
        await pilot.mouse_up("#loss", offset=(30, 4))
        await settle(pilot)
        assert chart.view.span is not None
        first, last = chart.view.span
        assert first < chart.view.cursor + 1 < last < 300
        await press(pilot, "escape")
        assert f"steps {first}–{last}" in "\n".join(rows(app))


@played
async def test_charts_are_drawn_over_time_and_samples(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, steps=300))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert any(row.rstrip("│ ").endswith("step 300") for row in rows(app))
        await press(pilot, "x")
        assert app.screen.query_one("#loss", BandChart).x_axis().name == "time"
        await press(pilot, "x")
        assert any(re.search(r"\d samples", row) for row in rows(app))


def resumed(parent: Run, first: int, last: int) -> Run:
    """A run that has gone on from a parent's checkpoint."""
    child = synthetic.run(paths.runs_folder(), steps=0)
    text = child.dir.recipe.read_text()
    child.dir.recipe.write_text(f'{text}\n[train]\nresume = "{parent.dir.checkpoints}/step_{first - 1}.pt"\n')
    noise = random.Random(first)
    for rank in range(2):
        steps = [synthetic.step_of(rank, step, noise) for step in range(first, last + 1)]
        synthetic.write(child.dir.rank_events(rank), *steps)
    return child


@played
async def test_a_run_that_was_resumed_twice_begins_with_the_curves_of_both_it_went_on_from(tmp_path: Path) -> None:
    oldest = synthetic.run(paths.runs_folder(), steps=200, status="stopped")
    child = resumed(resumed(oldest, 201, 300), 301, 360)
    app = console(child)
    async with app.run_test(size=(160, 45)) as pilot:
        await settle(pilot)
        await app.workers.wait_for_complete()
        app.tick()
        await settle(pilot)
        chart = app.screen.query_one("#loss", BandChart)
        assert [each.until for each in chart.earlier] == [301, 201]
        assert chart.default_span == (1, 360)
        await press(pilot, "l", "l")
        text = rows(app)
        assert any("resumed at 301" in row for row in text)
        assert sum("┊" in row for row in text) > 5, "a mark where it went on"
        ink = [x for row in text[3:-3] for x, cell in enumerate(row) if 0x2800 < ord(cell) < 0x2900]
        assert min(ink) < 20, "its curve begins at the oldest run's first step"
        await press(pilot, "x")
        assert chart.default_span == (301, 360)


@played
async def test_earlier_runs_of_the_recipe_lie_below_one_after_the_other(tmp_path: Path) -> None:
    earlier = synthetic.run(paths.runs_folder(), steps=200, status="stopped")
    app = console(synthetic.run(paths.runs_folder(), steps=300), runs=list_runs)
    async with app.run_test(size=(160, 45)) as pilot:
        await settle(pilot)
        chart = app.screen.query_one("#loss", BandChart)
        await press(pilot, "E")
        await settle(pilot)
        assert [each.name for each in chart.earlier] == [earlier.id]
        assert earlier.id in "\n".join(rows(app))
        await press(pilot, "E")
        assert len(chart.earlier) == 0


@played
async def test_validations_and_a_learning_rate_that_changes_stand_in_the_chart_of_the_loss(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=300)
    noise = random.Random(1)
    for rank in range(2):
        halved = [replace(synthetic.step_of(rank, step, noise), lr=0.001) for step in range(301, 321)]
        synthetic.write(run.dir.rank_events(rank), *halved)
    app = console(run)
    async with app.run_test(size=(160, 45)) as pilot:
        await settle(pilot)
        await press(pilot, "l", "l")
        text = "\n".join(rows(app))
        assert "◆" in text
        assert any(row.strip().startswith("lr │") for row in rows(app))


@played
async def test_the_hardware_takes_the_whole_screen_and_gives_it_back(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(120, 35)) as pilot:
        await settle(pilot)
        before = visible_panels(app.screen)  # type: ignore[arg-type]
        await press(pilot, "H")
        assert visible_panels(app.screen) == {"hardware"}  # type: ignore[arg-type]
        assert any("use %" in row for row in rows(app))
        await press(pilot, "p", "H", "H")
        assert visible_panels(app.screen) == before  # type: ignore[arg-type]
        await press(pilot, "H", "escape")
        assert visible_panels(app.screen) == before  # type: ignore[arg-type]


@played
async def test_ranks_can_be_sorted_while_the_table_is_not_to_be_seen(tmp_path: Path) -> None:
    app = console(two_ranks(tmp_path))
    async with app.run_test(size=(20, 5)) as pilot:
        await settle(pilot)
        grid = app.screen.query_one(RankGrid)
        await press(pilot, "h", "z")
        assert not grid.display
        before = grid.sort_key
        await press(pilot, "s", "R")
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


# ------------------------------------------------------------------------------------------- what is true at a moment


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (200, 55)])
@played
async def test_a_run_that_stands_still_shows_no_rate_or_time_left(size: tuple[int, int], tmp_path: Path) -> None:
    run = straggler(tmp_path)
    last = synthetic.BEGIN + 16
    phases: tuple[Literal["data", "sync"], ...] = ("data", "sync")
    for rank, part in zip((5, 2), phases, strict=True):
        stuck = Doing(time=last + 6, rank=rank, step=121, part=part, parts_done=0, waited_ms=5e3)
        synthetic.write(run.dir.rank_events(rank), stuck)
    app = console(run, silent_s=38)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        text = "\n".join(rows(app))
        assert "no step for 38 s" in text
        for words in ("samples/s", "   left ", "no findings", " training "):
            assert words not in text
        table = {row.split()[0]: row for row in rows(app) if re.match(r"[ ▲▸]+[0-9]+ +node", row)}
        assert " sync wait " in table["2"]
        assert "no step " in table["1"]
        await press(pilot, *["down"] * 6)
        assert any(" data " in row for row in rows(app) if re.match(r"[ ▲▸]+5 +node", row))


@played
async def test_no_rank_trains_in_a_run_that_is_over(tmp_path: Path) -> None:
    app = console(finished(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert not any(" training " in row for row in rows(app))
        assert sum(" ended " in row for row in rows(app)) == 2


@played
async def test_step_and_loss_are_the_same_wherever_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic.run(tmp_path / "home" / "runs", steps=40)
    noise = random.Random(3)
    for rank, steps in ((0, 5), (1, 3)):  # events that cover several steps, and end at different ones
        each = [round(noise.uniform(1.0, 3.0), 4) for _ in range(steps)]
        synthetic.write(run.dir.rank_events(rank), Step(
            time=synthetic.BEGIN + 8.5, rank=rank, step=40 + steps, epoch=1, steps=steps, samples=16 * steps,
            loss=sum(each) / steps, losses=each, step_ms=10.0, step_ms_each=[10.0] * steps))  # fmt: skip
    losses = [loss_at(last_steps(run.dir, rank)[::-1], 43) for rank in range(2)]
    assert None not in losses
    mean = f"{sum(loss or 0.0 for loss in losses) / 2:.4f}"
    summary = summarize(run, now=NOW)
    assert (summary["step"], f"{summary['loss']:.4f}") == (43, mean)
    assert runs_command.run(Namespace(json=False, filter="", sort=None, reverse=False)) == 0
    assert mean in capsys.readouterr().out
    app = console(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        header, panel = rows(app)[1], next(row for row in rows(app) if row.lstrip().startswith("loss "))
        assert f"loss {mean}" in header
        assert "43/500" in header
        assert f"loss {mean} nats" in panel
        assert "step 43" in "\n".join(rows(app))
        assert isinstance(app.screen, RunScreen)
        own = [app.screen.live.state.rank(rank).loss for rank in range(2)]
        for rank, loss in enumerate(own):
            assert any(re.match(rf"[ ▸]+{rank} .* {loss:.4f} ", row) for row in rows(app))
    reader = CurveReader(run)
    while reader.poll(math.inf):
        pass
    assert f"{reader.history.loss:.4f}" == mean
    reader.close()


def test_reading_curves_ends_with_the_time_of_a_poll_also_within_a_portion(tmp_path: Path) -> None:
    reader, polls = CurveReader(synthetic.run(tmp_path, steps=60, status="finished")), 0
    while reader.behind:
        reader.poll(-math.inf)
        polls += 1
    assert polls > 60, "an event each"
    assert reader.history.last_step == 60
    reader.close()


@played
async def test_a_flagged_rank_is_brought_into_view_among_many_and_a_selected_one_stays(tmp_path: Path) -> None:
    app = console(synthetic.run(tmp_path, nodes=128, ranks_per_node=8, steps=6, straggler=379))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await settle(pilot)
        flagged = re.compile(r"[ ▲▸]+379 +node047")
        assert any(map(flagged.match, rows(app)))
        assert any("▲379" in row for row in rows(app))  # its bar, beside those of groups
        assert isinstance(app.screen, RunScreen)
        app.screen.select(700)
        await settle(pilot)
        for size in ((120, 60), (80, 24), (60, 18), (120, 30)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            assert any(re.match(r"[ ▲▸]+700 ", row) for row in rows(app))
