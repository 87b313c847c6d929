from __future__ import annotations

import shlex
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch_screens import TEXT, launching, put, small_folder
from screens_at_rest import in_loop, seen, settle

from gputrain_tui.console.widgets.drawing import row_text
from gputrain_tui.console.widgets.form import Form, form_lines
from gputrain_tui.console.widgets.plan_view import PlanView, draw_plan, wrap_command
from gputrain_tui.history.runs import find
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.recipe.draft import Draft


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_folder(tmp_path, monkeypatch)


# Drawing


def test_a_command_is_broken_between_words_into_what_a_shell_reads_as_one() -> None:
    argv = ["/usr/bin/python", "-m", "trainer", "--lr", "0.1", "--cpu", "--prompt", "def x", "--data", "a b/c"]
    node = PlannedNode(node=0, host="n", first_rank=0, ranks=[0], devices=[0], argv=argv, env={"A": "x y"})
    lines = wrap_command(node, 30)
    assert all(len(line) <= 32 for line in lines)
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == ["A=x y", *argv]
    assert any("--lr 0.1" in line for line in lines)


def test_a_long_path_of_the_interpreter_leaves_room_for_the_command() -> None:
    argv = [f"/home/ada/{'deep/' * 20}bin/python3", "-m", "trainer", "--cpu"]
    node = PlannedNode(node=0, host="n", first_rank=0, ranks=[0], devices=["cpu"], argv=argv, env={})
    plan = Plan(world_size=1, init_method=None, backend="gloo", launcher="local", nodes=[node])
    assert row_text(draw_plan(plan, 60)[-1]).strip() == "…/python3 -m trainer --cpu"
    assert row_text(draw_plan(plan, 400)[-1]).strip() == " ".join(argv)


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
    async with launching(size) as (app, _pilot, _screen):
        text = seen(app)
        for part in ("tiny", "recipes/tiny.toml", "names the run", "2 ranks on 1 node", "0–1", "CPU × 2"):
            assert part in text, part
        assert "-m trainer" in text  # also where the path of this interpreter is long


@in_loop
async def test_an_edit_is_checked_while_it_is_typed_and_moves_the_plan() -> None:
    async with launching((120, 40)) as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("cluster.nodes[0].cpu_ranks")
        await pilot.press("enter", "backspace", "0")
        assert "cpu_ranks is '0', but must be an integer >= 1" in seen(app)
        await pilot.press("enter")
        assert screen.has_class("-editing"), "what is wrong is not taken"
        await pilot.press("backspace", "3", "enter")
        await settle(pilot)
        assert "3 ranks on 1 node" in seen(app)
        assert "1 change not saved" in seen(app)


@in_loop
async def test_escape_leaves_the_editor_without_a_change() -> None:
    async with launching((120, 40)) as (_app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("train.max_updates")
        await pilot.press("enter", "9", "escape")
        assert screen.draft is not None
        assert not screen.draft.changes
        assert screen.form.has_focus


@in_loop
async def test_switches_and_choices_change_with_one_key_and_back() -> None:
    async with launching((120, 40)) as (_app, pilot, screen):
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
async def test_what_the_machines_cannot_do_stands_beside_the_field() -> None:
    async with launching() as (app, pilot, screen):
        screen.form.focus()
        screen.form.go_to("task.data")
        await pilot.press("enter", "x", "enter")
        screen.form.go_to("train.batch_size")
        await pilot.press("enter", *"1,2,3", "enter")
        await settle(pilot)
        row = next(row for row in seen(app).splitlines() if "! batch_size" in row)
        assert "has 3 values, but the run has 2 ranks" in row


@in_loop
async def test_chosen_gpus_go_into_the_first_node() -> None:
    async with launching((120, 40), gpus={"localhost": (1, 3)}) as (app, _pilot, screen):
        assert screen.draft.nodes()[0] == {"gpus": [1, 3]}
        assert screen.form.field is not None
        assert screen.form.field.key == "cluster.nodes[0].gpus"
        assert app.session.gpus == {}


@in_loop
async def test_chosen_gpus_are_refused_by_a_recipe_for_other_machines(folder: Path) -> None:
    away = TEXT.replace("cpu_ranks = 2", 'host = "192.0.2.77"\ngpus = 2')
    (folder / "recipes" / "tiny.toml").write_text(away)
    async with launching((120, 40), gpus={"localhost": (0,)}) as (_app, _pilot, screen):
        assert not screen.draft.changes


@in_loop
async def test_saving_keeps_the_comments_and_another_name_keeps_the_file(folder: Path) -> None:
    async with launching((120, 40)) as (app, pilot, screen):
        await put(pilot, screen, "train.lr", "0.25")
        await pilot.press("s")
        await settle(pilot)
        saved = (folder / "recipes" / "tiny.toml").read_text()
        assert "lr = 0.25" in saved
        assert "# here" in saved
        assert "# A recipe with a comment." in saved
        await put(pilot, screen, "train.lr", "0.5")
        await pilot.press("A", "enter")
        await settle(pilot)
        copy = tomllib.loads((folder / "recipes" / "tiny-2.toml").read_text())
        assert copy["train"]["lr"] == 0.5
        assert (folder / "recipes" / "tiny.toml").read_text() == saved
        assert "recipes/tiny-2.toml" in seen(app)


@in_loop
async def test_what_is_wrong_is_not_saved(folder: Path) -> None:
    async with launching((120, 40)) as (_app, pilot, screen):
        await put(pilot, screen, "train.lr", "-1")
        await pilot.press("s")
        assert (folder / "recipes" / "tiny.toml").read_text() == TEXT


@in_loop
async def test_the_commands_go_to_the_clipboard_and_into_a_file(folder: Path) -> None:
    async with launching((120, 40)) as (app, pilot, _screen):
        await pilot.press("c", "C")
        assert "--distributed-world-size 2" in app.clipboard
        assert (folder / "tiny-commands.txt").read_text() == app.clipboard


@in_loop
async def test_a_folder_without_recipes_says_where_they_are_looked_for(folder: Path) -> None:
    (folder / "recipes" / "tiny.toml").unlink()
    async with launching((80, 24)) as (app, pilot, _screen):
        text = seen(app)
        assert "No recipe here." in text
        assert "./recipes/*.toml" in text
        await pilot.press("enter", "s", "A", "c", "C", "L", "slash", "a", "x", "backspace", "space")
        assert app.place == "launch"


@in_loop
async def test_changes_stay_with_their_recipe_while_another_is_looked_at(folder: Path) -> None:
    (folder / "recipes" / "zebra.toml").write_text(TEXT.replace("tiny", "zebra"))
    async with launching((120, 40)) as (app, pilot, screen):
        screen.draft.set("train.lr", "0.5")
        await pilot.press("down")
        await settle(pilot)
        assert "recipes/zebra.toml" in seen(app)
        await pilot.press("up")
        await settle(pilot)
        assert screen.draft.changes == {"train.lr": "0.5"}
        assert "1 change not saved" in seen(app)


@in_loop
async def test_launching_starts_a_supervisor_and_shows_the_run_also_where_a_check_warns(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / "step_00000001.pt").touch()
    async with launching((120, 40)) as (app, pilot, screen):
        await put(pilot, screen, "train.save_dir", "kept")
        assert "ready, 1 warning" in seen(app)
        await pilot.press("L", "L")
        await settle(pilot)
        assert app.place == "run"
        assert app.live is not None
        supervisor = find("last").status.supervisor
        assert supervisor is not None
        with suppress(psutil.NoSuchProcess):
            psutil.Process(supervisor.pid).wait(timeout=120)
        assert find("last").state == "finished"
        assert app.live.id == find("last").id


@in_loop
async def test_eighty_fields_do_not_make_the_screen_slow_to_show() -> None:
    async with launching((120, 40)) as (app, _pilot, _screen):
        form = app.screen.query_one(Form)
        assert form.count() > 70
        assert len(form.children) == 0
        assert app.screen.query_one(PlanView).plan is not None
