from __future__ import annotations

import shlex
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_screens import TEXT, open_launch_screen, set_field, small_folder, validate_on_fixed_machine
from row_texts import row_text
from screens_at_rest import in_loop, screen_text, settle, toasts
from small_disk import small_file_system
from textual.events import Key
from textual.widgets import Input
from waiting import LIMIT_S

from gputrain_tui.console.screens.confirm import Confirm
from gputrain_tui.console.validate_recipe import ValidatedRecipe
from gputrain_tui.console.widgets.form import Form, form_lines
from gputrain_tui.console.widgets.plan_view import PlanView, draw_plan, wrap_command
from gputrain_tui.console.widgets.preflight_summary import PreflightSummary
from gputrain_tui.history.run_folders import find
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.recipe.draft import Draft


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_folder(tmp_path, monkeypatch)


# Drawing


def test_a_long_command_is_wrapped_with_continuation_lines() -> None:
    argv = ["/usr/bin/python", "-P", "-m", "trainer", "--lr", "0.1", "--cpu", "--prompt", "def x", "--data", "a b/c"]
    node = PlannedNode(node=0, host="n", first_rank=0, ranks=[0], devices=[0], argv=argv, env={"A": "x y"})
    lines = wrap_command(node, 30)
    assert all(len(line) <= 32 for line in lines)
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == ["A=x y", *argv]
    assert any("--lr 0.1" in line for line in lines)


def test_in_a_wide_terminal_commands_stand_beside_the_nodes() -> None:
    argv = ["/bin/python3", "-P", "-m", "trainer", "--cpu"]
    nodes = [
        PlannedNode(node=index, host=f"n{index}", first_rank=index, ranks=[index], devices=["cpu"], argv=argv, env={})
        for index in range(3)
    ]
    plan = Plan(world_size=3, init_method=None, backend="gloo", launcher="ssh", nodes=nodes)
    narrow, wide = draw_plan(plan, 100), draw_plan(plan, 169)
    assert len(wide) == 8 < len(narrow)
    assert [len(row_text(row)) for row in wide] == [169] * 8
    assert row_text(wide[1]).split() == ["0", "n0", "0", "0", "CPU", *argv]


def test_a_long_path_of_the_interpreter_leaves_room_for_the_command() -> None:
    argv = [f"/home/ada/{'deep/' * 20}bin/python3", "-P", "-m", "trainer", "--cpu"]
    node = PlannedNode(node=0, host="n", first_rank=0, ranks=[0], devices=["cpu"], argv=argv, env={})
    plan = Plan(world_size=1, init_method=None, backend="gloo", launcher="local", nodes=[node])
    assert row_text(draw_plan(plan, 60)[-1]).strip() == "…/python3 -P -m trainer --cpu"
    assert row_text(draw_plan(plan, 800)[-1]).strip().endswith(" ".join(argv))


def test_a_plan_shows_first_ranks_ranks_and_devices() -> None:
    nodes = [
        PlannedNode(node=0, host="a", first_rank=0, ranks=[0, 1, 2, 3], devices=[0, 1, 2, 3], argv=["x"], env={}),
        PlannedNode(node=1, host="b", first_rank=4, ranks=[4], devices=["cpu"], argv=["x"], env={}),
    ]
    plan = Plan(world_size=5, init_method="tcp://a:1", backend="gloo", launcher="ssh", nodes=nodes)
    rows = [row_text(row).split() for row in draw_plan(plan, 80)]
    assert rows[1] == ["0", "a", "0", "0–3", "GPU", "0,", "1,", "2,", "3"]
    assert rows[2] == ["1", "b", "4", "4", "CPU"]


def test_a_search_keeps_fields_whose_name_or_help_holds_the_words() -> None:
    fields = Draft(TEXT, name="tiny.toml").fields()
    found = form_lines(fields, "learning rate peak")
    assert [getattr(line, "key", getattr(line, "text", "")) for line in found] == ["Optimizer", "train.lr"]


# The screen


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@in_loop
async def test_a_recipe_its_form_and_its_plan_are_seen_at_every_size(size: tuple[int, int]) -> None:
    async with open_launch_screen(size) as (app, _pilot, _screen):
        text = screen_text(app)
        for part in ("tiny", "recipes/tiny.toml", "names the run", "2 ranks on 1 node", "0–1", "CPU × 2"):
            assert part in text, part
        assert "-m trainer" in text  # also where the path of this interpreter is long


@in_loop
async def test_an_edit_is_checked_while_it_is_typed_and_moves_the_plan() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("cluster.nodes[0].cpu_ranks")
        await pilot.press("enter", "backspace", "0")
        assert "cpu_ranks is '0', but must be an integer >= 1" in screen_text(app)
        await pilot.press("enter")
        assert screen.has_class("-editing"), "what is wrong is not taken"
        await pilot.press("backspace", "3", "enter")
        await settle(pilot)
        assert "3 ranks on 1 node" in screen_text(app)
        assert "1 change not saved" in screen_text(app)


@pytest.mark.parametrize(("key", "field"), [("tab", "cluster.nodes[0].ranks"), ("shift+tab", "cluster.nodes[0].gpus")])
@in_loop
async def test_tab_takes_the_typed_value_and_goes_to_the_next_field(key: str, field: str) -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("cluster.nodes[0].cpu_ranks")
        await pilot.press("enter", "0", key)
        assert screen.has_class("-editing"), "what is wrong is not taken"
        await pilot.press("backspace", "3", key)
        assert screen.draft.nodes() == [{"cpu_ranks": 3}]
        assert not screen.has_class("-editing")
        assert screen.form.has_focus
        assert screen.form.field.key == field


@in_loop
async def test_tab_completes_a_path_before_it_takes_it(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").touch()
    (folder / "texts" / "other.txt").touch()
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("task.data")
        editor = screen.query_one("#editor", Input)
        await pilot.press("enter", *"texts", "tab")
        assert editor.value == "texts/"
        await pilot.press("o", "tab")
        assert editor.value == "texts/o"
        assert "one.txt  other.txt" in toasts(app)
        await pilot.press("n", "tab")
        assert editor.value == "texts/one.txt"
        await pilot.press("tab")
        assert screen.draft.changes == {"task.data": "texts/one.txt"}


@in_loop
async def test_no_letter_is_a_command_while_a_value_is_typed_or_after_the_mouse_left_it() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("name")
        await pilot.press("enter", *"LqSdaxu1")
        assert screen.query_one("#editor", Input).value == "LqSdaxu1"
        await pilot.click("#plan", offset=(3, 1))
        assert not screen.has_class("-editing"), "no line stays open that has no letters"
        assert screen.draft.changes == {"name": "LqSdaxu1"}
        assert app.place == "launch"


@in_loop
async def test_keys_typed_ahead_go_into_the_value() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("train.max_updates")
        await settle(pilot)
        for character in ("enter", "1", "2", "enter", "slash", "l", "r", "enter"):
            app.post_message(Key(character, character if len(character) == 1 else None))
        deadline = time.monotonic() + LIMIT_S
        while (screen.form.search != "lr" or screen.has_class("-editing")) and time.monotonic() < deadline:
            await settle(pilot)
        assert screen.draft.changes == {"train.max_updates": "12"}
        assert screen.form.search == "lr"
        assert app.screen is screen


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("lr", "train.lr"),
        ("cpu", "cluster.nodes[0].cpu_ranks"),
        ("max_u", "train.max_updates"),
        ("data", "task.data"),
        ("peak learning rate", "train.lr"),
        ("slurm.account", "slurm.account"),
    ],
)
@in_loop
async def test_a_search_goes_to_the_field_that_is_meant_and_escape_restores(query: str, key: str) -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("train.seed")
        await pilot.press("slash")
        screen.query_one("#editor", Input).value = query
        await pilot.pause()
        assert screen.form.field.key == key
        assert any(row.lstrip().startswith("find ") or " find " in row for row in screen_text(app).splitlines())
        await pilot.press("escape")
        assert (screen.form.search, screen.form.field.key) == ("", "train.seed")
        await pilot.press("slash")
        screen.query_one("#editor", Input).value = query
        await pilot.press("enter")
        assert (screen.form.search, screen.form.field.key) == (query, key)


@in_loop
async def test_the_line_for_a_name_is_labelled() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, _screen):
        await pilot.press("A")
        assert "save as recipes/tiny-2.toml" in screen_text(app)


@in_loop
async def test_leaving_with_unsaved_changes_needs_a_confirmation() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await set_field(pilot, screen, "train.lr", "0.25")
        await pilot.press("q")
        assert isinstance(app.screen, Confirm)
        assert "recipes/tiny.toml" in screen_text(app)
        await pilot.press("n")
        assert app.screen is screen
        assert app.is_running
        await pilot.press("u", "q")
    assert app.return_code == 0, "nothing is asked when nothing was changed"


@in_loop
async def test_changes_are_undone_one_after_the_other_wherever_they_were_made() -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        await set_field(pilot, screen, "train.lr", "0.25")
        await pilot.press("a")
        screen.form.go_to("train.shuffle")
        await pilot.press("space")
        screen.form.go_to("name")
        await pilot.press("u")
        assert screen.form.field.key == "train.shuffle"
        assert set(screen.draft.changes) == {"train.lr", "cluster.nodes"}
        await pilot.press("u", "u")
        assert screen.draft.changes == {}
        assert screen.form.field.key == "train.lr"


@in_loop
async def test_adding_and_removing_a_node_changes_nothing(folder: Path) -> None:
    recipe = folder / "recipes" / "tiny.toml"
    recipe.write_text(recipe.read_text().replace("[[cluster.nodes]]\ncpu_ranks = 2           # here\n", ""))
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await pilot.press("a", "x")
        await settle(pilot)
        assert screen.draft.changes == {}
        assert "not saved" not in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 30)])
@in_loop
async def test_errors_are_whole_and_the_cursor_goes_to_the_field_at_fault(size: tuple[int, int]) -> None:
    async with open_launch_screen(size) as (app, pilot, screen):
        await set_field(
            pilot, screen, "task.data", "no/such/folder/with/a/rather/long/name/so/that/it/takes/two/lines.txt"
        )
        screen.form.go_to("train.seed")
        await pilot.press("L")
        await settle(pilot)
        assert screen.form.field.key == "task.data"
        summary = app.screen.query_one(PreflightSummary)
        text = " ".join(
            "".join(part.text for part in summary.render_line(y)).strip() for y in range(summary.size.height)
        )
        assert "lines.txt" in text
        assert "…" not in text
        assert summary.size.height > 2
        assert screen.query_one(Form).size.height >= 6


@in_loop
async def test_saving_a_wrong_value_goes_to_its_field() -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        screen.draft.set("train.lr", "-1")
        await set_field(pilot, screen, "train.seed", "3")
        await pilot.press("s")
        assert screen.form.field.key == "train.lr"


@in_loop
async def test_slurm_and_the_environment_of_a_node_are_fields() -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        await set_field(pilot, screen, "cluster.nodes[0].env", "OMP_NUM_THREADS=2 NOTE='two words'")
        await set_field(pilot, screen, "cluster.env", "NCCL_DEBUG=INFO")
        assert screen.session.recipe.cluster.of_node(0).env == {
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "2",
            "NOTE": "two words",
        }
        await set_field(pilot, screen, "slurm.partition", "gpu")
        await set_field(pilot, screen, "slurm.extra", "--exclusive, --cpus-per-task=16")
        slurm = screen.session.recipe.slurm
        assert (slurm.partition, slurm.extra) == ("gpu", ("--exclusive", "--cpus-per-task=16"))
        keys = {field.key for field in screen.draft.fields()}
        for name in ("partition", "account", "qos", "time", "mem", "constraint", "gpu_type", "setup", "extra"):
            assert f"slurm.{name}" in keys
        for name in ("workdir", "python", "env", "setup"):
            assert {f"cluster.{name}", f"cluster.nodes[0].{name}"} <= keys


@in_loop
async def test_escape_leaves_the_editor_without_a_change() -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("train.max_updates")
        await pilot.press("enter", "9", "escape")
        assert screen.draft is not None
        assert not screen.draft.changes
        assert screen.form.has_focus


@in_loop
async def test_switches_and_choices_change_with_one_key_and_back() -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("train.shuffle")
        await pilot.press("space")
        assert screen.draft is not None
        assert screen.draft.changes == {"train.shuffle": "false"}
        screen.form.go_to("train.precision")
        await pilot.press("right")
        assert screen.draft.changes["train.precision"] == "bf16"
        await pilot.press("left", "left")
        assert screen.draft.changes["train.precision"] == "fp16"
        await pilot.press("backspace")
        assert "train.precision" not in screen.draft.changes


@in_loop
async def test_a_plan_beyond_the_machines_is_reported_beside_the_field() -> None:
    async with open_launch_screen() as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("task.data")
        await pilot.press("enter", "x", "enter")
        screen.form.go_to("train.batch_size")
        await pilot.press("enter", *"1,2,3", "enter")
        await settle(pilot)
        row = next(row for row in screen_text(app).splitlines() if "! batch_size" in row)
        assert "has 3 values, but there are 2 ranks" in row


@in_loop
async def test_chosen_gpus_go_into_the_first_node() -> None:
    async with open_launch_screen((120, 40), gpus={"localhost": (1, 3)}) as (app, _pilot, screen):
        assert screen.draft.nodes()[0] == {"gpus": [1, 3]}
        assert screen.form.field is not None
        assert screen.form.field.key == "cluster.nodes[0].gpus"
        assert app.session.gpus == {}


@in_loop
async def test_chosen_gpus_are_refused_by_a_recipe_for_other_machines(folder: Path) -> None:
    away = TEXT.replace("cpu_ranks = 2", 'host = "192.0.2.77"\ngpus = 2')
    (folder / "recipes" / "tiny.toml").write_text(away)
    async with open_launch_screen((120, 40), gpus={"localhost": (0,)}) as (_app, _pilot, screen):
        assert not screen.draft.changes


@in_loop
async def test_saving_keeps_the_comments_and_another_name_keeps_the_file(folder: Path) -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await set_field(pilot, screen, "train.lr", "0.25")
        await pilot.press("s")
        await settle(pilot)
        saved = (folder / "recipes" / "tiny.toml").read_text()
        assert "lr = 0.25" in saved
        assert "# here" in saved
        assert "# A recipe with a comment." in saved
        await set_field(pilot, screen, "train.lr", "0.5")
        await pilot.press("A", "enter")
        await settle(pilot)
        copy = tomllib.loads((folder / "recipes" / "tiny-2.toml").read_text())
        assert copy["train"]["lr"] == 0.5
        assert (folder / "recipes" / "tiny.toml").read_text() == saved
        assert "recipes/tiny-2.toml" in screen_text(app)


@in_loop
async def test_a_wrong_value_is_not_saved(folder: Path) -> None:
    async with open_launch_screen((120, 40)) as (_app, pilot, screen):
        await set_field(pilot, screen, "train.lr", "-1")
        await pilot.press("s")
        assert (folder / "recipes" / "tiny.toml").read_text() == TEXT


@in_loop
async def test_the_commands_go_to_the_clipboard(folder: Path) -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, _screen):
        await pilot.press("c")
        assert "--distributed-world-size 2" in app.clipboard


@in_loop
async def test_a_folder_without_recipes_shows_the_searched_places(folder: Path) -> None:
    (folder / "recipes" / "tiny.toml").unlink()
    async with open_launch_screen((80, 24)) as (app, pilot, _screen):
        text = screen_text(app)
        assert "No recipe here." in text
        assert "./recipes/*.toml" in text
        await pilot.press("enter", "s", "A", "c", "C", "L", "slash", "a", "x", "backspace", "space")
        assert app.place == "launch"


@in_loop
async def test_changes_stay_with_their_recipe_while_another_is_selected(folder: Path) -> None:
    (folder / "recipes" / "zebra.toml").write_text(TEXT.replace("tiny", "zebra"))
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        screen.draft.set("train.lr", "0.5")
        await pilot.press("down")
        await settle(pilot)
        assert "recipes/zebra.toml" in screen_text(app)
        await pilot.press("up")
        await settle(pilot)
        assert screen.draft.changes == {"train.lr": "0.5"}
        assert "1 change not saved" in screen_text(app)


@in_loop
async def test_while_another_recipe_is_checked_plan_and_verdict_are_not_those_of_the_one_before(folder: Path) -> None:
    (folder / "recipes" / "zebra.toml").write_text(TEXT.replace("tiny", "zebra"))
    answered = threading.Event()

    def validate(text: str, **options: Any) -> ValidatedRecipe:
        if "zebra" in text:
            answered.wait(LIMIT_S)
        return validate_on_fixed_machine(text, **options)

    async with open_launch_screen((120, 40), validate=validate) as (app, pilot, screen):
        await settle(pilot)
        assert "✓ ready" in screen_text(app)
        await pilot.press("down")
        await pilot.pause()
        try:
            assert "recipes/zebra.toml" in screen_text(app)
            assert "✓ ready" not in screen_text(app)
            assert "checking …" in screen_text(app)
            assert screen.copyable() is None, "there is no command to copy"
        finally:
            answered.set()
        await settle(pilot)
        assert "✓ ready" in screen_text(app)


@in_loop
async def test_launching_starts_a_supervisor_and_shows_the_run_also_where_a_check_warns(folder: Path) -> None:
    with small_file_system(folder / "kept", "200m"):
        await launch_with_a_warning()


async def launch_with_a_warning() -> None:
    async with open_launch_screen((120, 40)) as (app, pilot, screen):
        await set_field(pilot, screen, "train.save_dir", "kept")
        assert "ready, 1 warning" in screen_text(app)
        await pilot.press("L", "L")
        await settle(pilot)
        assert app.place == "run"
        assert app.live is not None
        supervisor = find("last").status.supervisor
        assert supervisor is not None
        with suppress(psutil.NoSuchProcess):
            psutil.Process(supervisor.pid).wait(timeout=300)
        assert find("last").state == "finished"
        assert app.live.id == find("last").id


@in_loop
async def test_eighty_fields_do_not_make_the_screen_slow_to_show() -> None:
    async with open_launch_screen((120, 40)) as (app, _pilot, _screen):
        form = app.screen.query_one(Form)
        assert len(form.lines) > 70
        assert len(form.children) == 0
        assert app.screen.query_one(PlanView).plan is not None
