"""What is selected or pointed at is what comes to the clipboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from launch_screens import small_folder
from screen_frames import console, played, press, rows, settle
from screens_at_rest import toasts
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget

from gputrain_tui.console.widgets.findings import Findings
from gputrain_tui.console.widgets.log_view import LogView
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.history.run_folders import Run

SIZE = (120, 40)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TZ", "UTC")
    return small_folder(tmp_path, monkeypatch)


def straggler(root: Path) -> Run:
    return synthetic.run(root / "home" / "runs", name="bert", nodes=2, ranks_per_node=8, steps=120, straggler=5)


def failed(root: Path) -> Run:
    return synthetic.run(
        root / "home" / "runs", name="bert", nodes=2, ranks_per_node=2, steps=60, failed_rank=3, status="failed"
    )


def mouse(kind: type[events.MouseEvent], x: int, y: int) -> events.MouseEvent:
    return kind(None, x, y, 0, 0, 1, False, False, False, x, y)


async def drag(pilot: Pilot[int], begin: tuple[int, int], end: tuple[int, int]) -> None:
    """Move the mouse with its button down, as a terminal reports it."""
    for kind, (x, y) in ((events.MouseDown, begin), (events.MouseMove, end), (events.MouseUp, end)):
        pilot.app.post_message(mouse(kind, x, y))
        await pilot.pause()


def screen_position(widget: Widget, x: int, y: int) -> tuple[int, int]:
    return widget.region.x + x, widget.region.y + y


PANELS = [
    ("run", "#header", 0), ("run", "#ranks", 3), ("run", "#findings", 1), ("run", "#loss", 0), ("run", "#late", 0),
    ("rank", "#facts", 1), ("rank", "#log", 2), ("launch", "#recipes", 1), ("launch", "#form", 2),
    ("launch", "#detail", 0), ("launch", "#plan", 1), ("launch", "#readiness", 0), ("history", "#runs", 2),
    ("history", "#card", 0), ("cluster", "#machine", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "screen",
    ["run", "launch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rank", "history", "cluster"))],
)
@played
async def test_selected_text_is_highlighted_and_copied(screen: str, folder: Path) -> None:
    run = straggler(folder)
    app = console(run, runs=lambda: [run])
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await settle(pilot)
        if screen == "rank":
            await press(pilot, "enter")
        elif screen != "run":
            await app.action_go(screen)
            await settle(pilot)
            await app.workers.wait_for_complete()
            await settle(pilot)
        for panel in (name for of, name, _ in PANELS if of == screen):
            widget = app.screen.query_one(panel)
            line = next(y for of, name, y in PANELS if (of, name) == (screen, panel))
            x, y = screen_position(widget, 1, line)
            expected = rows(app)[y][x : x + 12]
            assert expected.strip(), f"{panel} shows nothing there: {rows(app)[y]!r}"
            await drag(pilot, (x, y), (x + 11, y))
            ground = app.screen.get_component_rich_style("screen--selection").bgcolor
            lit = [part for part in widget.render_line(line) if part.style and part.style.bgcolor == ground]
            assert "".join(part.text for part in lit) == expected, panel
            assert all(part.style and part.style.color != ground for part in lit), "it can be read"
            await pilot.press("ctrl+c")
            await settle(pilot)
            assert app.clipboard == expected.rstrip(), panel
            assert any(toast.startswith("copied ") for toast in toasts(app)), panel
            assert not app.screen.selections, "what was copied is let go"


@played
async def test_a_selection_of_several_lines_stays_in_its_panel(folder: Path) -> None:
    app = console(straggler(folder))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        grid = app.screen.query_one(RankGrid)
        x, y = screen_position(grid, 4, 2)
        before = rows(app)
        await drag(pilot, (x, y), (SIZE[0] - 1, grid.region.bottom + 3))
        assert set(app.screen.selections) == {grid}
        await pilot.press("ctrl+c")
        lines = [row[grid.region.x : grid.region.right].rstrip() for row in before[y : grid.region.bottom]]
        assert app.clipboard == "\n".join([lines[0][4:], *lines[1:]]).rstrip()


@played
async def test_a_panel_holds_still_while_its_text_is_selected_and_catches_up_then(folder: Path) -> None:
    run = straggler(folder)
    app = console(run)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await settle(pilot)
        grid = app.screen.query_one(RankGrid)
        x, y = screen_position(grid, 0, 2)
        before = rows(app)[y]
        await drag(pilot, (x, y), (x + 60, y))
        assert "text is selected" in rows(app)[-1]
        assert app.screen.query_one(RankGrid).selected_rank is None, "a selection is no click"
        await press(pilot, "s")
        assert rows(app)[y] == before
        await press(pilot, "escape")
        assert "text is selected" not in rows(app)[-1]
        assert app.place == "run"
        assert "sort" not in before
        assert rows(app)[y - 1 :] != before


@played
async def test_selected_lines_of_a_log_stay_selected_while_more_come(folder: Path) -> None:
    run = straggler(folder)
    app = console(run)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, "o", "o")
        log = app.screen.query_one(LogView)
        x, y = screen_position(log, 0, log.page - 1)
        chosen = [row[log.region.x : log.region.right].rstrip(" ┃") for row in rows(app)[y : y + 2]]
        await drag(pilot, (x, y), (log.region.right - 1, y + 1))
        with run.dir.rank_log(0).open("a") as file:
            file.write("".join(f"more {number}\n" for number in range(200)))
        await settle(pilot)
        assert not log.following
        await pilot.press("ctrl+c")
        assert app.clipboard.splitlines() == chosen
        await press(pilot, "end")
        assert "more 199" in "\n".join(rows(app))


@pytest.mark.parametrize(
    ("make", "keys", "what", "parts"),
    [
        (
            failed,
            "c",
            "the failure",
            ["rank 3 on node001 failed in step 61", "of memory. Tried", "torch.OutOf"],
        ),
        (straggler, "c", "the finding", ["warning: rank 5 on node000", "excess ms 20.10", "advice: "]),
        (straggler, "f y", "the finding", ["rank 5", "advice: "]),
        (straggler, "f down c", "the finding", ["waiting for data takes 52 %", "cleared"]),
        (straggler, "o y", "a line of the log", ["step 29 loss 4.710"]),
        (straggler, "o slash s t e p space 1 2 enter c", "a line of the log", ["step 12 loss 4.880"]),
    ],
)
@played
async def test_the_copy_key_copies_the_item_under_the_cursor(
    make: Callable[[Path], Run], keys: str, what: str, parts: list[str], folder: Path
) -> None:
    app = console(make(folder))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await settle(pilot)
        await press(pilot, *keys.split())
        assert f"copied {what}" in toasts(app)
        assert [part for part in parts if part not in app.clipboard] == []
        assert "\x1b" not in app.clipboard


@played
async def test_a_clicked_line_of_the_log_is_the_one_that_is_copied(folder: Path) -> None:
    app = console(straggler(folder))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, "o", "o")
        log = app.screen.query_one(LogView)
        await pilot.click(LogView, offset=(5, 4))
        expected = rows(app)[log.region.y + 4][log.region.x : log.region.right - 1].split(None, 1)[1].rstrip(" ┃")
        await press(pilot, "y")
        assert app.clipboard == expected


@played
async def test_a_second_click_opens_and_selects_nothing(folder: Path) -> None:
    app = console(straggler(folder))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        await pilot.click(Findings, offset=(5, 1), times=2)
        assert app.screen.selections == {}


@played
async def test_the_command_of_the_node_under_the_cursor_is_copied(folder: Path) -> None:
    recipe = folder / "recipes" / "tiny.toml"
    recipe.write_text(recipe.read_text().replace("[train]", "[[cluster.nodes]]\ncpu_ranks = 1\n[train]"))
    app = console(None)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await app.action_go("launch")
        await settle(pilot)
        await app.workers.wait_for_complete()
        await settle(pilot)
        form = app.screen.query_one("#form")
        form.focus()
        form.go_to("cluster.nodes[1].host")  # type: ignore[attr-defined]
        await press(pilot, "y")
        assert app.clipboard.startswith("# node 1"), toasts(app)
        assert app.clipboard.count("# node ") == 1
        await press(pilot, "c")
        assert app.clipboard.count("# node ") == 2


@played
async def test_copying_from_a_screen_with_nothing_to_copy_is_a_notice(folder: Path) -> None:
    app = console(synthetic.run(folder / "home" / "runs", steps=5))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await settle(pilot)
        await press(pilot, "c")
        assert any("nothing to copy here" in toast for toast in toasts(app))
