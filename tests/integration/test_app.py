from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic
from manual_clock import ManualClock
from screen_frames import console, played, press, rows, settle
from screens_at_rest import settle as at_rest, toasts
from textual.events import Click, Key, Resize
from textual.geometry import Size

from gputrain_tui.console.app import GputrainApp, Palette
from gputrain_tui.console.entry import going_on
from gputrain_tui.console.screens.compare_screen import CompareScreen
from gputrain_tui.console.screens.confirm import LEAST_KEY_GAP_S, Confirm
from gputrain_tui.console.screens.run_screen import RunScreen
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.lifecycle.stop_run import stop
from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.new_recipe import example_path
from trainer.contract.record import AnyEvent


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    for name in ("TEXTUAL_THEME", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@played
async def test_the_demo_starts_with_one_key_and_outlives_the_console() -> None:
    app = console(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("d")
        await app.workers.wait_for_complete()
        await settle(pilot)
        assert isinstance(app.screen, RunScreen)
        await pilot.press("q")
    (run,) = list_runs()
    assert run.status.recipe == "demo"
    assert run.state in ("starting", "running")
    _, left = stop(run)
    assert left == []


class CountingReader(RunReader):
    """Counts its calls."""

    polls = 0

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        self.polls += 1
        return super().poll(budget_bytes)


@played
async def test_a_run_at_rest_is_read_less_often_until_something_comes(home: Path) -> None:
    run = synthetic.run(home / "runs", steps=5)
    reader = CountingReader(run.dir)
    app = GputrainApp(run, clocked=False, follow=lambda found: LiveRun(found, source=reader), runs=list)

    def polls(calls: int) -> int:
        before = reader.polls
        for _ in range(calls):
            app.poll()
        return reader.polls - before

    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert polls(20) == 20
        polls(5)
        assert polls(50) == 10
        for rank in (0, 1):
            synthetic.write(run.dir.rank_events(rank), synthetic.step_of(rank, 6, random.Random(1)))
        polls(5)
        assert polls(10) == 10


@played
async def test_quitting_leaves_the_run_alone(home: Path) -> None:
    run = synthetic.run(home / "runs", steps=5)
    before = {path: path.read_bytes() for path in run.dir.path.rglob("*") if path.is_file()}
    app = console(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("q")
    assert app.return_code == 0
    assert {path: path.read_bytes() for path in run.dir.path.rglob("*") if path.is_file()} == before


@played
async def test_the_console_opens_with_the_run_that_goes_on(home: Path) -> None:
    over = synthetic.run(home / "runs", name="over", steps=5, status="finished")
    going = synthetic.run(home / "runs", name="going", steps=5)
    app = console(None, runs=lambda: [over, going])
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.live is not None
        assert app.live.id == going.id


@played
async def test_opening_another_run_lets_go_of_the_first(home: Path) -> None:
    one = synthetic.run(home / "runs", name="one", steps=5, status="finished")
    two = synthetic.run(home / "runs", name="two", steps=5, status="finished")
    app = console(one)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await app.open_run(two)
        await settle(pilot)
        assert "two" in rows(app)[0]
        await app.open_run(two)
        await app.open_run(one)
        await settle(pilot)
        assert "one" in rows(app)[0]


@played
async def test_the_screen_of_a_run_that_was_deleted_says_so(home: Path) -> None:
    run = synthetic.run(home / "runs", steps=60, status="failed", failed_rank=1)
    clock = ManualClock(100.0)
    app = GputrainApp(run, clocked=False, follow=lambda found: LiveRun(found, clock=clock))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        assert "failed" in rows(app)[0]
        await pilot.press("4")
        await at_rest(pilot)
        await pilot.press("x")
        await pilot.pause(LEAST_KEY_GAP_S)
        await pilot.press("y")
        await at_rest(pilot)
        assert list_runs() == []
        clock.seconds += 60
        await press(pilot, "3")
        assert rows(app)[0].startswith(" × deleted   demo")
        assert "this run was deleted" in rows(app)[1]
        assert not any("failed in step" in row for row in rows(app))
        await press(pilot, "S")
        assert toasts(app)[-1] == f"{run.id} was deleted"
        await press(pilot, "K", "escape", "r", "e", "o", "f", "C")
        assert app.is_running


@played
async def test_the_palette_has_the_actions_of_the_screen(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Stop (S)", "Findings (f)", "Help (?)", "Quit (q)"} <= titles


LISTS = {"run": "", "findings": "f", "log": "o o", "rank": "enter", "stack": "enter K tab", "help": "question_mark"}
"""Keys that give a list or a text the keys."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("run", "log", "help"))) for name in LISTS]
)
@played
async def test_the_ends_of_lists_and_texts_are_reached_by_keys(name: str, home: Path) -> None:
    run = synthetic.run(home / "runs", nodes=8, ranks_per_node=8, steps=60, straggler=5)
    run.dir.rank_log(0).write_text("".join(f"line {number}\n" for number in range(500)))
    app = console(run)
    async with app.run_test(size=(160, 45)) as pilot:
        await settle(pilot)
        await press(pilot, *LISTS[name].split(), "home")
        first = rows(app)
        await press(pilot, "G")
        last = rows(app)
        assert name == "stack" or last != first
        await press(pilot, "home")
        assert rows(app) == first
        await press(pilot, "end")
        assert rows(app) == last
        await press(pilot, "j", "k", "G")
        assert rows(app) == last


@played
async def test_g_shows_the_synchronisation(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=60))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "g")
        assert "sync wait ms" in "\n".join(rows(app))
        assert not app.screen.query_one(RankGrid).display, "it is shown beside the table already, so it is enlarged"
        await press(pilot, "g")
        assert app.screen.query_one(RankGrid).display, "pressed again, it goes back"


@played
async def test_a_colon_opens_the_palette(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "colon")
        assert isinstance(app.screen, Palette)


@pytest.mark.parametrize("size", [(3, 3), (80, 1), (1, 24), (20, 2)])
@played
async def test_a_palette_in_a_tiny_terminal_takes_every_key(size: tuple[int, int], home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "colon", *"rank")
        await pilot.pause()
        await pilot.resize_terminal(*size)
        await pilot.pause()
        await press(pilot, "down", "pagedown", "pageup", "ctrl+end", "ctrl+home", "up", "escape")
        assert app.is_running


@pytest.mark.parametrize(
    ("keys", "notice"), [("", "q leaves the console"), ("slash", "esc, then q leaves the console")]
)
@played
async def test_ctrl_c_names_the_key_that_quits(keys: str, notice: str, home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await settle(pilot)
        await press(pilot, *keys.split(), "ctrl+c")
        assert any(toast.startswith(notice) for toast in toasts(app))
        assert app.is_running


@played
async def test_keys_typed_at_once_go_where_each_one_leads(home: Path) -> None:
    app = console(synthetic.run(home / "runs", nodes=2, ranks_per_node=4, steps=30))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for character in "/node001q4":
            app.post_message(Key("slash" if character == "/" else character, character))
        await settle(pilot)
        await settle(pilot)
        assert app.screen.query_one(RankGrid).filter_text == "node001q4"
        await press(pilot, "backspace", "backspace", "tab")
        assert app.screen.query_one(RankGrid).filter_text == "node001"
        await press(pilot, "S")
        assert isinstance(app.screen, Confirm), "after tab, keys are commands again"


@played
async def test_a_run_that_ended_is_compared_edited_and_resumed_from_its_own_screen(home: Path) -> None:
    old, alone, new = (
        synthetic.run(home / "runs", name=name, steps=20, status="stopped") for name in ("demo", "other", "demo")
    )
    (new.dir.checkpoints / "step_00000020.pt").write_bytes(b"1")
    app = console(new, runs=lambda: [new, alone, old])
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        assert "r Resume  e Edit and rerun  C Compare" in rows(app)[-1]
        await press(pilot, "C")
        assert isinstance(app.screen, CompareScreen)
        await press(pilot, "escape", "r")
        assert f"Resume {new.id}?" in "\n".join(rows(app))
        await press(pilot, "n", "e")
        assert app.place == "launch"
        await app.open_run(alone)
        await settle(pilot)
        await press(pilot, "C")
        assert any("no other of the newest runs is one of other" in toast for toast in toasts(app))


@played
async def test_a_run_that_goes_on_is_not_resumed(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=20))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        assert "Resume" not in rows(app)[-1]
        await press(pilot, "r")
        assert any("S stops it" in toast for toast in toasts(app))


@played
async def test_a_palette_is_not_left_behind_when_the_screen_changes(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for action in (app.action_command_palette, app.action_help):
            action()
            await pilot.pause()
            above = app.screen
            assert not isinstance(above, RunScreen)
            await app.action_go("history")
            await pilot.pause()
            assert type(app.screen).__name__ == "HistoryScreen"
            assert not above.is_attached
            await app.pop_screen()  # what a click that was on its way to it does
            await app.action_go("run")
            await pilot.pause()
            assert isinstance(app.screen, RunScreen)


@played
async def test_a_click_from_before_the_terminal_became_smaller_is_taken_calmly(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "ctrl+p")
        palette = app.screen
        await pilot.resize_terminal(20, 5)
        palette.post_message(Click(palette, 60, 3, 0, 0, 1, False, False, False, 60, 3))
        await pilot.pause()
        assert app.is_running
        assert app.screen is palette


@played
async def test_a_click_before_the_layout_of_a_terminal_that_became_larger_is_taken_calmly(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(20, 5)) as pilot:
        await settle(pilot)
        await press(pilot, "ctrl+p")
        palette = app.screen
        for turns in range(6):  # of the loop, in one of which the size is new and the layout is not
            app.post_message(Resize(Size(80, 24), Size(80, 24)))
            for _ in range(turns):
                await asyncio.sleep(0)
            # On its input line: if the layout is there already, the click chooses nothing.
            palette.post_message(Click(palette, 40, 5, 0, 0, 1, False, False, False, 40, 5))
            await pilot.pause()
            assert app.is_running
            assert app.screen is palette
            await pilot.resize_terminal(20, 5)


@played
async def test_a_theme_is_kept_for_the_next_start() -> None:
    app = console(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.theme == "textual-dark"
        await press(pilot, "T")
        assert app.theme == "textual-light"
    assert console(None).theme == "textual-light"


def test_a_light_terminal_gets_a_light_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")
    assert GputrainApp().theme == "textual-light"
    monkeypatch.setenv("COLORFGBG", "15;0")
    assert GputrainApp().theme == "textual-dark"
    monkeypatch.setenv("TEXTUAL_THEME", "no-such-theme")
    assert GputrainApp().theme == "textual-dark"


@pytest.mark.parametrize(
    ("term", "name"), [("xterm", "ansi-dark"), ("linux", "ansi-dark"), ("tmux-256color", "textual-dark")]
)
def test_a_terminal_of_sixteen_colours_gets_its_own(term: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLORTERM", raising=False)
    assert GputrainApp().theme == name


@played
async def test_a_click_in_the_footer_does_what_the_key_does(home: Path) -> None:
    app = console(synthetic.run(home / "runs", steps=5))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.click("KeyBar", offset=(rows(app)[-1].index("? Help"), 0))
        await settle(pilot)
        assert "keys of the run screen" in "\n".join(rows(app))


@played
async def test_colours_can_be_done_without(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = console(synthetic.run(home / "runs", nodes=2, ranks_per_node=8, steps=60, straggler=5))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await settle(pilot)
        assert app.no_color
        await press(pilot, "down")
        styles = [segment.style for strip in app.screen._compositor.render_strips() for segment in strip]
        assert {style.color.name for style in styles if style is not None and style.color is not None} <= {"default"}
        assert {style.bgcolor.name for style in styles if style is not None and style.bgcolor is not None} <= {
            "default"
        }
        assert any(style is not None and style.reverse for style in styles)  # the cursor
        panels = app.screen.query("Panel")
        assert panels
        for panel in panels:  # red without its colour is a grey that stands out less than the text beside it
            styles = [panel.get_component_rich_style(f"canvas--{name}", partial=True) for name in ("error", "bright")]
            assert styles[0].bold
            assert styles[0].color == styles[1].color


def test_the_demo_is_a_recipe_that_loads() -> None:
    assert load(str(example_path("demo"))).name == "demo"


def test_the_console_without_a_terminal_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gputrain_tui"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gputrain: the console needs a terminal")


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["a"], "1 run goes on: a (`gputrain attach a`, `gputrain stop a`)"),
        (["a", "b"], "2 runs go on: a, b (`gputrain attach RUN`, `gputrain stop RUN`)"),
        (list("abcde"), "5 runs go on: a, b, c and 2 more (`gputrain attach RUN`, `gputrain stop RUN`)"),
    ],
)
def test_the_line_about_runs_that_go_on_names_them_and_the_commands(names: list[str], line: str) -> None:
    assert going_on(names) == line


def test_attaching_to_a_missing_run_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gputrain_tui", "attach", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no run" in done.stderr


NATIVE = """
import os, sys
from gputrain_tui.console.terminal import captured_stderr
with captured_stderr():
    os.write(2, b"noise of a library\\n")
    print("the screen", file=sys.__stderr__, flush=True)
print("afterwards", file=sys.stderr)
"""


def test_stderr_of_libraries_is_held_back_until_the_screen_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=True)
    assert done.stderr == "the screen\nnoise of a library\nafterwards\n"


IMPORTED = """
import sys
import gputrain_tui.console.app
import gputrain_tui.console.screens.run_screen
heavy = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "pynvml", "tomlkit")]
heavy += [name for name in ("textual.widgets._markdown", "textual.widgets._text_area") if name in sys.modules]
print(*heavy)
"""


def test_the_run_screen_needs_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("words", [["--fps", "0"], ["--fps=fast"], ["attach", "last", "--fps", "100"]])
def test_a_wrong_paint_rate_is_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "gputrain_tui", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not a number from 0.2 to 30" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("read_s", "left"), [(0.0, 0), (math.inf, 1)])
@played
async def test_a_notification_closes_with_the_next_key_after_its_reading_time(
    read_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gputrain_tui.console.app.TOAST_READ_S", read_s)
    app = console(None)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await settle(pilot)
        app.report("the disk is full", alarm=True)
        await settle(pilot)
        below = [row for row in rows(app) if "the disk is full" in row]
        assert len(below) == 1
        await press(pilot, "down")
        assert len([row for row in rows(app) if "the disk is full" in row]) == left


@played
async def test_keys_that_follow_the_one_that_quits_are_not_for_the_console() -> None:
    app = console(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for key in ("q", "1", "4", "d"):
            app.post_message(Key(key, key))
        await pilot.pause()
    assert app.return_code == 0
    assert list_runs() == []


@played
async def test_a_folder_of_runs_that_cannot_be_read_is_one_line(home: Path) -> None:
    (home / "runs").write_text("no folder")
    app = console(None, runs=list_runs)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await settle(pilot)
        assert app.place == "history"
        await press(pilot, "3")
        assert f"cannot read the runs in {home / 'runs'}: Not a directory" in toasts(app)


@played
async def test_the_demo_needs_a_confirmation_where_runs_exist(home: Path) -> None:
    run = synthetic.run(home / "runs", steps=5, status="finished")
    app = console(None, runs=lambda: [run])
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "d")
        assert isinstance(app.screen, Confirm)
        await press(pilot, "n")
        assert [run.id for run in list_runs()] == [run.id]
