from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import synthetic
from row_texts import row_text
from run_dirs import run_dir
from screens_at_rest import in_loop, open_screen, quiet_app, screen_text, settle

from gputrain_tui import paths
from gputrain_tui.console.screens.compare_screen import CompareScreen
from gputrain_tui.console.screens.confirm import LEAST_KEY_GAP_S
from gputrain_tui.console.screens.history_screen import HistoryScreen
from gputrain_tui.console.widgets.run_list import SORT_KEYS, RunList, columns_for, draw_run
from gputrain_tui.history.notes import Notes, read_notes
from gputrain_tui.history.run_columns import BEST
from gputrain_tui.history.run_folders import Run, list_runs
from gputrain_tui.history.status_file import write_status
from gputrain_tui.history.summary import summarize
from gputrain_tui.lifecycle.delete import delete_run
from trainer.contract.errors import RequestError
from trainer.contract.record import Finding, Metrics

T0 = 1_790_000_000.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return paths.runs_folder()


@pytest.fixture
def three_runs(root: Path) -> list[Run]:
    return [
        run_dir(root, "slow", started=T0, lr=0.01),
        run_dir(root, "fast", started=T0 + 100, lr=0.2, steps=80),
        run_dir(root, "broken", started=T0 + 200, status="failed", message="rank 1 ran out of memory"),
    ]


def history() -> HistoryScreen:
    return HistoryScreen(now=lambda: T0 + 1000, clocked=False)


@pytest.mark.parametrize("width", [60, 78, 118, 198])
def test_a_runs_line_fits(width: int, root: Path) -> None:
    entry = summarize(run_dir(root, "a-name-that-goes-on-and-on-and-on-for-ever"), now=T0)
    assert len(row_text(draw_run(entry, width, columns_for(width, [entry]), number=1))) == width


def test_the_best_validation_has_a_column_where_it_is_not_the_newest(root: Path) -> None:
    entry = {**summarize(run_dir(root, "one"), now=T0), "valid": 0.5}
    best = {"value": 0.912, "step": 300, "metric": "accuracy", "maximize": True}
    newest = {"value": 0.5, "step": 400, "metric": "loss", "maximize": False}
    lines = [{**entry, "best_valid": best}, {**entry, "best_valid": newest}]
    columns = columns_for(198, lines)
    first, second = (row_text(draw_run(line, 198, columns, number=None)) for line in lines)
    assert "   0.5000  accuracy 0.9120 at 300  " in first
    assert "accuracy" not in second
    assert "best_valid" not in [column.key for column in columns_for(198, lines[1:])]
    assert BEST in SORT_KEYS


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@in_loop
async def test_no_run_offers_the_demo(size: tuple[int, int]) -> None:
    app = quiet_app()
    async with app.run_test(size=size, notifications=True) as pilot:
        await open_screen(pilot, history())
        assert "No run yet." in screen_text(app)
        assert "d trains the demo" in screen_text(app)
        await pilot.press("enter", "space", "c", "r", "e", "S", "x")
        assert app.place == "history"
        await pilot.press("3")
        await settle(pilot)
        assert "no run yet; d trains the demo, 2 opens a recipe" in screen_text(app)


@in_loop
async def test_runs_are_listed_newest_first_with_their_outcomes(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        rows = [row for row in screen_text(app).splitlines() if "20260921" in row]
        assert [row.split()[1] for row in rows[:3]] == ["failed", "finished", "finished"]
        assert "80   1.0100       40 s" in rows[1]
        assert "rank 1 ran out of memory" in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert app.place == "run"
        assert app.live is not None
        assert app.live.id == three_runs[2].id


@in_loop
async def test_a_run_is_deleted_only_after_a_yes(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        await pilot.press("x", "n")
        await settle(pilot)
        assert len(list_runs()) == 3
        await pilot.press("x")
        await pilot.pause(LEAST_KEY_GAP_S)
        await pilot.press("y")
        await settle(pilot)
        assert [run.id for run in list_runs()] == [three_runs[1].id, three_runs[0].id]
        assert three_runs[2].id not in screen_text(app)


def test_a_run_that_goes_on_is_not_deleted(root: Path) -> None:
    running = run_dir(root, "going", status="running")
    with pytest.raises(RequestError, match=r"is running; stop it with `gputrain stop "):
        delete_run(running)
    assert running.dir.path.is_dir()


@in_loop
async def test_the_screen_refuses_to_delete_a_running_run(root: Path) -> None:
    run_dir(root, "going", status="running")
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        await pilot.press("x")
        assert app.place == "history", "nothing is asked"
        assert len(list_runs()) == 1


@in_loop
async def test_marking_two_runs_compares_their_curves_and_recipes(three_runs: list[Run]) -> None:
    for run in three_runs[:2]:
        events = (Metrics(time=2e9, rank=0, step=step, values={"f1 [b]": step / 8}) for step in (1, 8))
        synthetic.write(run.dir.rank_events(0), *events)
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        await pilot.press("c")
        assert app.place == "history", "one must be marked first"
        await pilot.press("down", "space", "down", "space")
        assert "2 marked, c compares them" in screen_text(app)
        await pilot.press("c")
        await settle(pilot)
        app.tick()
        await settle(pilot)
        text = screen_text(app)
        assert isinstance(app.screen, CompareScreen)
        assert "loss  mean of the ranks over steps" in text
        assert "step 80" in text
        assert "differ in 3 keys" in text
        assert next(row for row in text.splitlines() if "train.lr" in row).split() == ["train.lr", "0.2", "0.01"]
        assert any("valid  1.5000" in row for row in text.splitlines())
        await pilot.press("t")
        await settle(pilot)
        assert "loss  mean of the ranks over time since the start" in screen_text(app)
        await pilot.press("y", "m")
        await settle(pilot)
        assert "smooth over 10 steps" in screen_text(app)
        await pilot.press("v")
        await settle(pilot)
        assert "throughput  samples/s of all ranks over time since the start" in screen_text(app)
        assert any("samples/s" in row and "32" in row for row in screen_text(app).splitlines()[-20:])
        await pilot.press("v")
        await settle(pilot)
        assert "sync wait  ms over time" in screen_text(app)
        await pilot.press("M", "f", "1", "enter")
        await settle(pilot)
        assert "f1 [b]  mean of the ranks over time" in screen_text(app)
        await pilot.press("v")
        await settle(pilot)
        assert "sync wait  ms over time" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert app.place == "history"


@in_loop
async def test_six_runs_can_be_marked_and_not_a_seventh(root: Path) -> None:
    for index in range(7):
        run_dir(root, f"run-{index}", started=T0 + index, steps=1)
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        for _ in range(7):
            await pilot.press("space", "down")
        assert len(app.screen.query_one(RunList).marked) == 6


@in_loop
async def test_a_run_without_a_checkpoint_cannot_be_resumed(three_runs: list[Run]) -> None:
    app = quiet_app()
    notices: list[str] = []
    async with app.run_test(size=(120, 40)) as pilot:
        app.report = lambda text, alarm=False: notices.append(text)  # type: ignore[method-assign]
        await open_screen(pilot, history())
        await pilot.press("r")
        await settle(pilot)
        assert "continues from" not in screen_text(app)
        (notice,) = notices
        assert "has no checkpoint" in notice
        assert len(list_runs()) == 3


@in_loop
async def test_a_finished_run_with_findings_is_marked_in_its_line_and_its_card(root: Path) -> None:
    run = run_dir(root, "nan", started=T0)
    nan = Finding(time=T0, kind="non_finite", severity="critical", rank=1, step=60, cause="loss", message="NaN")
    write_status(run.dir, msgspec.structs.replace(run.status, findings=[nan], loss=None))
    run_dir(root, "fine", started=T0 - 100)
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        marked, fine = [row for row in screen_text(app).splitlines() if " finished " in row and "20260921" in row][:2]
        assert "▲ finished" in marked
        assert " nan " in marked
        assert "✓ finished" in fine
        assert "finished, with NaN since step 60 on rank 1" in screen_text(app)


@in_loop
async def test_runs_are_sorted_and_filtered_by_the_titles_of_their_columns(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        names = [run.id.rpartition("-")[2] for run in reversed(three_runs)]

        def listed() -> list[str]:
            return [entry["id"].rpartition("-")[2] for entry in app.screen.query_one(RunList).lines]

        assert listed() == names == ["broken", "fast", "slow"]
        await pilot.press("s", "s", "s")
        await settle(pilot)
        assert listed() == ["fast", "broken", "slow"]
        assert "by loss" in screen_text(app)
        await pilot.press("R")
        assert listed() == ["slow", "broken", "fast"]
        await pilot.press("slash", *"state:failed")
        assert listed() == ["broken"]
        assert "1 of 3" in screen_text(app)
        await pilot.press(*" nosuch", "enter")
        await settle(pilot)
        assert "No run matches 'state:failed nosuch'." in screen_text(app)
        assert "esc clears the filter" in screen_text(app)
        await pilot.press("escape")
        assert len(listed()) == 3


@in_loop
async def test_a_long_filter_that_nothing_matches_says_so_in_a_narrow_terminal(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(40, 12)) as pilot:
        await open_screen(pilot, history())
        await pilot.press("slash", *"!recipe:slow !recipe:fast !recipe:broken", "enter")
        await settle(pilot)
        assert "No run matches '!recipe:slow" in screen_text(app)
        assert "esc clears the filter" in screen_text(app)


@in_loop
async def test_a_filter_that_is_not_understood_stays_in_the_line(three_runs: list[Run]) -> None:
    three_runs[0].status.metrics = {"accuracy": 0.5}
    write_status(three_runs[0].dir, three_runs[0].status)
    app = quiet_app()
    notices: list[str] = []
    async with app.run_test(size=(120, 40)) as pilot:
        app.report = lambda text, alarm=False: notices.append(text)  # type: ignore[method-assign]
        await open_screen(pilot, history())
        await pilot.press("slash", *"lss<2", "enter")
        assert notices == ["filter 'lss<2': no column 'lss'; did you mean 'loss'?"]
        assert app.focused is app.screen.query_one("#editor")
        await pilot.press("ctrl+u", *"accuracy>0.9", "enter")
        assert notices[-1] == "filter 'accuracy>0.9': no column 'accuracy'; did you mean 'metric:accuracy'?"


@in_loop
async def test_the_reason_why_a_filter_is_wrong_does_not_cover_it(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await open_screen(pilot, history())
        await pilot.press("slash", *"lss<2", "enter")
        await settle(pilot)
        (toast,) = app.screen.query("Toast")
        line = app.screen.query_one("#editor")
        assert line.region.height == 1
        assert not toast.region.overlaps(line.region)


@in_loop
async def test_a_note_and_tags_are_written_to_the_run_under_the_cursor(three_runs: list[Run]) -> None:
    app = quiet_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await open_screen(pilot, history())
        await pilot.press("n", *"quits at once", "enter")
        await settle(pilot)
        await pilot.press("t", *"lr-sweep bad", "enter")
        await settle(pilot)
        assert read_notes(three_runs[2].dir) == Notes(note="quits at once", tags=("bad", "lr-sweep"))
        assert "[bad] [lr-sweep] quits at once" in screen_text(app)
        await pilot.press("n", *" never", "escape")
        await settle(pilot)
        assert read_notes(three_runs[2].dir).note == "quits at once"


@in_loop
async def test_a_recipe_is_launched_again_with_edits_and_the_runs_own_stays(three_runs: list[Run]) -> None:
    app = quiet_app()
    write_status(three_runs[2].dir, msgspec.structs.replace(three_runs[2].status, workdir="/elsewhere"))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await open_screen(pilot, history())
        await pilot.press("e")
        await settle(pilot)
        assert app.place == "launch"
        assert three_runs[2].id in screen_text(app)
        assert "was started in /elsewhere; its relative paths now begin in" in screen_text(app)
        await pilot.press("s")
        await settle(pilot)
        assert app.screen.has_class("-editing"), "it is saved under another name"
