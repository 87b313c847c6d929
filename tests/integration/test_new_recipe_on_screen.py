"""A recipe gets another task, is written anew, and has values that are pasted or of any characters, on the screen."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from launch_screens import TEXT, open_launch_screen, set_field, small_folder
from rich.cells import cell_len
from screens_at_rest import in_loop, quiet_app, screen_text, settle, toasts
from textual.events import Paste
from textual.widgets import Input

from gputrain_tui.console.screens.launch_screen import LaunchScreen
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.form import draw_field
from gputrain_tui.console.widgets.preflight_summary import PreflightSummary
from gputrain_tui.recipe.form_fields import Field
from trainer.contract.schema import Option

USERS_TASK = """
import msgspec
from trainer.tasks.task import Task

class Options(msgspec.Struct):
    width: int = 32

class Mlp(Task):
    Options = Options
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_folder(tmp_path, monkeypatch)


def text_of(widget: Canvas) -> str:
    """Return the text of a widget on one line."""
    rows = ("".join(part.text for part in widget.render_line(y)) for y in range(widget.size.height))
    return " ".join(" ".join(rows).split())


@in_loop
async def test_another_task_names_the_keys_that_it_removes_and_undo_brings_them_back() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await set_field(pilot, screen, "train.task", "mnist")
        line = "removed, as they were set for another task or script: data, context, dim, layers, heads, sample_bytes"
        assert any(line in toast for toast in toasts(app))
        assert "context is not known" not in screen_text(app)
        app.clear_notifications()
        await pilot.press("u")
        await settle(pilot)
        assert screen.draft.text == TEXT
        assert "✓ ready" in screen_text(app)


@in_loop
async def test_the_options_of_a_users_task_are_shown_once_they_are_known(folder: Path) -> None:
    (folder / "mlp.py").write_text(USERS_TASK)
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await set_field(pilot, screen, "train.task", "mlp.py:Mlp")
        assert {"task.width"} == {field.key for field in screen.draft.fields() if field.key.startswith("task.")}
        assert "is not known" not in screen_text(app)


@in_loop
async def test_a_recipe_of_another_task_is_saved_without_the_keys_of_the_former_one(folder: Path) -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        await set_field(pilot, screen, "train.task", "mnist")
        await set_field(pilot, screen, "task.data", "digits 🙂")
        await pilot.press("s")
        text = (folder / "recipes" / "tiny.toml").read_text()
        assert tomllib.loads(text)["task"] == {"data": "digits 🙂"}
        assert "# here" in text


@pytest.mark.parametrize(
    ("typed", "file", "train"),
    [
        ("lm", "lm.toml", {"task": "lm", "max_epochs": 1}),
        ("train.py --lr 0.1", "train.toml", {"script": "train.py", "args": ["--lr", "0.1"]}),
        ("$ torchrun --nproc-per-node 2 train.py", "train.toml", {"script": "train.py"}),
    ],
)
@in_loop
async def test_a_folder_without_recipes_gets_one_from_a_task_a_script_or_a_command(
    folder: Path, typed: str, file: str, train: dict[str, object]
) -> None:
    (folder / "recipes" / "tiny.toml").unlink()
    (folder / "train.py").touch()
    async with open_launch_screen((80, 24)) as (app, pilot, screen):
        assert "n  for a new one: a script, a task, a torchrun command" in screen_text(app)
        assert "checking" not in screen_text(app), "there is nothing to check"
        await pilot.press("n", *typed, "enter")
        await settle(pilot)
        assert tomllib.loads((folder / file).read_text())["train"] == train
        assert screen.draft.name == file
        assert screen.form.has_focus
        assert re.search("preflight [✓✗!]", text_of(app.screen.query_one(PreflightSummary)))


@in_loop
async def test_a_new_recipe_replaces_no_file_and_a_word_that_is_nothing_to_train_keeps_the_line_open(
    folder: Path,
) -> None:
    (folder / "lm.toml").write_text(TEXT)
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await pilot.press("n", *"mnits", "enter")
        assert any("neither a Python file nor a task; did you mean 'mnist'?" in toast for toast in toasts(app))
        assert screen.has_class("-editing")
        screen.query_one("#editor", Input).value = "lm"
        await pilot.press("enter")
        await settle(pilot)
        assert (folder / "lm.toml").read_text() == TEXT
        assert screen.draft.name == "lm-2.toml"
        await pilot.press("n", "escape")
        assert not screen.has_class("-editing")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("trian.py --lr 0.1", "'trian.py' does not exist in {folder}; did you mean 'train.py'?"),
        (
            "torchrun --nproc-per-node 2 sub/train.py",
            "'sub/train.py' does not exist in {folder}; did you mean 'train.py'?",
        ),
        ("other.py:Mlp", "'other.py' does not exist in {folder}; did you mean 'train.py'?"),
    ],
)
@in_loop
async def test_a_script_that_does_not_exist_gets_no_recipe(folder: Path, typed: str, line: str) -> None:
    (folder / "train.py").touch()
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await pilot.press("n")
        screen.query_one("#editor", Input).value = typed
        await pilot.press("enter")
        await app.workers.wait_for_complete()
        await settle(pilot)
        assert line.format(folder=folder) in toasts(app)
        assert screen.has_class("-editing")
        assert list(folder.glob("*.toml")) == []


ACCELERATE = """#!/bin/sh
tries=100
while [ ! -e answered ] && [ $tries -gt 0 ]; do sleep 0.05; tries=$((tries - 1)); done
echo '{"env": {"ACCELERATE_USE_FSDP": "true"}, "torchrun": {"nproc_per_node": "2"}}'
"""


@in_loop
async def test_a_command_that_takes_long_to_read_leaves_the_screen_to_its_user(folder: Path) -> None:
    (folder / "train.py").touch()
    (folder / "python").write_text(ACCELERATE)
    (folder / "python").chmod(0o755)
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await pilot.press("n")
        editor = screen.query_one("#editor", Input)
        editor.value = command = f"{folder}/accelerate launch --use_fsdp train.py"
        await pilot.press("enter")
        await pilot.pause()
        assert "reading …" in screen_text(app)
        assert list(folder.glob("*.toml")) == []
        await pilot.press("escape")
        assert "reading …" not in screen_text(app)
        await pilot.press("n")
        editor.value = command
        await pilot.press("enter")
        (folder / "answered").touch()
        await app.workers.wait_for_complete()
        await settle(pilot)
        assert [path.name for path in folder.glob("*.toml")] == ["train.toml"]
        env = tomllib.loads((folder / "train.toml").read_text())["cluster"]["env"]
        assert env == {"ACCELERATE_USE_FSDP": "true"}


@in_loop
async def test_a_new_recipe_is_offered_in_the_palette() -> None:
    app = quiet_app()
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await settle(pilot)
        assert "2 opens a recipe, or writes one" in screen_text(app)
        await pilot.press("1")
        await settle(pilot)
        assert "New recipe" in [command.title for command in app.get_system_commands(app.screen)]
        await app.action_new_recipe()
        await settle(pilot)
        assert isinstance(app.screen, LaunchScreen)
        assert "new recipe for" in screen_text(app)
        assert app.screen.query_one("#editor", Input).has_focus


@pytest.mark.parametrize(
    ("typed", "file"), [("other", "other.toml"), ("b/c.json", "b/c.json.toml"), ("d.toml", "d.toml")]
)
@in_loop
async def test_save_as_adds_the_suffix_by_which_recipes_are_listed(folder: Path, typed: str, file: str) -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await pilot.press("A")
        screen.query_one("#editor", Input).value = typed
        await pilot.press("enter")
        await settle(pilot)
        assert (folder / file).is_file()
        assert f"saved {file}" in toasts(app)
        await pilot.press("A")
        screen.query_one("#editor", Input).value = "recipes/"
        await pilot.press("enter")
        assert "not saved: recipes is a folder" in toasts(app)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@in_loop
async def test_a_pasted_block_is_kept_whole_or_refused(end: str) -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("task.data")
        await pilot.press("enter")
        editor = screen.query_one("#editor", Input)
        editor.value = ""
        app.post_message(Paste(f"one.txt{end}two.txt{end}"))
        await settle(pilot)
        assert editor.value == ""
        assert "not pasted: it has 2 lines, and this line takes one" in toasts(app)
        app.post_message(Paste(f"one.txt{end}"))
        await settle(pilot)
        assert editor.value == "one.txt"
        await pilot.press("escape", "n")
        app.post_message(Paste(f"torchrun \\{end}  --nproc-per-node 2 \\{end}  train.py{end}"))
        await settle(pilot)
        assert editor.value.split() == ["torchrun", "--nproc-per-node", "2", "train.py"]


def test_a_value_of_wide_characters_leaves_the_help_in_its_column() -> None:
    option = Option(name="data", kind="str", help="a file")
    fields = [Field(key="task.data", group="Task", option=option, value=value, written=True, changed=False)
              for value in ("abc", "日🙂", "日🙂" * 30)]  # fmt: skip
    rows = ["".join(text for text, _ in draw_field(field, 80, None)) for field in fields]
    assert len({cell_len(row.partition("a file")[0]) for row in rows}) == 1


@in_loop
async def test_the_field_with_the_cursor_is_marked_without_colours() -> None:
    async with open_launch_screen() as (_app, pilot, screen):
        screen.form.focus()
        for key in ("train.task", "train.optimizer"):
            screen.form.go_to(key)
            await settle(pilot)
            lines = ["".join(part.text for part in screen.form.render_line(y)) for y in range(screen.form.size.height)]
            assert [line.split()[:2] for line in lines if "▸" in line] == [["▸", key.partition(".")[2]]]
