from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
from launch_screens import TEXT, fixed_folder, two_recipes
from screen_frames import SIZES, assert_screen
from screens_at_rest import in_loop, quiet_app, settle, show

from gputrain_tui.console.screens.launch import LaunchScreen
from gputrain_tui.console.validate_recipe import ValidatedRecipe
from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.plan.planner import plan
from gputrain_tui.preflight import PreflightFacts, run_checks
from gputrain_tui.preflight.facts import Folder, MissingInput, Port
from gputrain_tui.recipe import model as recipes
from gputrain_tui.recipe.draft import message_key
from trainer.contract.errors import RequestError

SIZED = pytest.mark.parametrize("size", SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return two_recipes(fixed_folder(tmp_path, monkeypatch))


HERE = LocalFacts(free_port=21000, names=frozenset({"10.0.0.1"}))
READY = PreflightFacts(
    data_checked=True,
    port=Port(number=21000, state="free"),
    memory_total_bytes=64 << 30,
    memory_available_bytes=48 << 30,
    cores=8,
    home=Folder(path="home/runs", free_bytes=200 << 30),
)
MISSING = MissingInput(key="task.data", what="data/books does not exist", fix="set task.data to where it lies")
NOT_READY = msgspec.structs.replace(
    READY,
    data=MISSING,
    port=Port(number=21000, state="busy", holder="python3 (pid 4711)"),
    cores=1,
    save_dir=Folder(path="/scratch/ours", free_bytes=300 << 20, checkpoints=3),
)


def examined(
    text: str, *, name: str, settings: list[str], task: str = "", facts: PreflightFacts = READY
) -> ValidatedRecipe:
    """Plan on a machine that is the same for everybody."""
    try:
        recipe = recipes.build(text, name=name, overrides=settings)
        planned = plan(recipe, {}, local=HERE)
    except RequestError as error:
        return ValidatedRecipe(settings=tuple(settings), problem=str(error), key=message_key(str(error)))
    results = tuple(run_checks(recipe, planned, facts, local=HERE))
    return ValidatedRecipe(settings=tuple(settings), recipe=recipe, plan=planned, results=results)


@SIZED
@in_loop
async def test_a_launch_on_two_nodes(size: str) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        await show(pilot, LaunchScreen(settle_s=0, examine=examined))
        await pilot.press("down")
        await settle(pilot)
        assert_screen(f"launch_{size}", app)


@SIZED
@in_loop
async def test_a_machine_that_is_not_ready(size: str, folder: Path) -> None:
    for path in (folder / "recipes").iterdir():
        path.unlink()
    (folder / "recipes" / "books.toml").write_text(
        TEXT.replace("tiny", "books")
        .replace("text.txt", "data/books")
        .replace("threads", 'save_dir = "/scratch/ours"\nthreads')
    )
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        screen = LaunchScreen(settle_s=0, examine=partial(examined, facts=NOT_READY))
        await show(pilot, screen)
        screen.form.focus()
        screen.form.go_to("task.data")
        await settle(pilot)
        assert_screen(f"launch_not_ready_{size}", app)


@SIZED
@in_loop
async def test_an_editor_with_something_wrong_in_it(size: str) -> None:
    app = quiet_app()
    async with app.run_test(size=SIZES[size]) as pilot:
        screen = LaunchScreen(settle_s=0, examine=examined)
        await show(pilot, screen)
        assert screen.draft is not None
        screen.draft.set("train.batch_size", "1, 2, 3")
        screen.form.focus()
        screen.form.go_to("train.lr")
        await pilot.press("enter", *"fast")
        await settle(pilot)
        assert_screen(f"launch_editing_{size}", app)
