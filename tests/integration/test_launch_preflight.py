"""The preflight on the launch screen: beside its field during an edit, and before a launch."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch_screens import TEXT, open_launch_screen, set_field, small_folder
from msgspec.structs import replace
from row_texts import row_text
from screens_at_rest import in_loop, screen_text, settle, toasts
from small_disk import small_file_system

from gputrain_tui.commands.check import report
from gputrain_tui.console.validate_recipe import ValidatedRecipe, validate_recipe
from gputrain_tui.console.widgets.form import draw_field
from gputrain_tui.console.widgets.preflight_summary import draw_preflight
from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.preflight import CheckResult
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.form_fields import FieldMessage


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_folder(tmp_path, monkeypatch)


def result(status: str, key: str = "", what: str = "found", fix: str = "") -> CheckResult:
    return CheckResult(status=status, check="data", what=what, fix=fix, key=key)  # type: ignore[arg-type]


def rows(results: Sequence[CheckResult], *, problem: str = "", width: int = 60, height: int = 3) -> list[str]:
    return [row_text(row).rstrip() for row in draw_preflight(results, problem, width, height)]


# Drawing


@pytest.mark.parametrize(
    ("statuses", "headline"),
    [
        (["ok", "note"], "✓ ready"),
        (["ok", "warning"], "! ready, 1 warning"),
        (["error", "warning", "warning"], "✗ 1 error, 2 warnings"),
    ],
)
def test_the_headline_counts_errors_and_warnings(statuses: list[str], headline: str) -> None:
    head = rows([result(status) for status in statuses])[0]
    assert head.startswith(f"preflight  {headline} ")
    assert head.endswith(f"{len(statuses)} checks")


def test_errors_come_first_and_lines_that_do_not_fit_are_counted() -> None:
    found = [result("warning", what="slow"), *(result("error", what=f"bad {index}", fix="mend it") for index in (1, 2))]
    drawn = rows(found)
    assert drawn[1:] == ["  ✗ data  bad 1 → mend it", "  ✗ data  bad 2 → mend it"]
    assert "2 of 3 shown" in drawn[0]
    assert rows(found, height=4)[3] == "  ! data  slow"


def test_what_is_wrong_on_several_hosts_alike_is_one_result_that_names_them() -> None:
    everywhere = [replace(result("error", what="is missing", fix="push it"), host=f"n{index}") for index in range(16)]
    found = [*everywhere, replace(result("error", what="is read-only"), host="n7"), result("warning", what="slow")]
    head, *drawn = rows(found, width=80, height=9)
    assert head.startswith("preflight  ✗ 17 errors, 1 warning ")
    assert drawn == [
        "  ✗ data  n0, n1, n2, n3 and 12 more: is missing → push it",
        "  ✗ data  n7: is read-only",
        "  ! data  slow",
    ]
    assert report(found, "several").splitlines() == [
        "several: 17 errors, 1 warning",
        "✗ data  n0, n1, n2, n3 and 12 more: is missing",
        "        → push it",
        "✗ data  n7: is read-only",
        "! data  slow",
    ]


def test_a_result_of_this_machine_and_of_hosts_names_both() -> None:
    alike = [result("warning", what="slow"), replace(result("warning", what="slow"), host="h2")]
    assert rows(alike)[1:] == ["  ! data  this machine, h2: slow"]


def test_an_error_is_whole_however_long_it_is() -> None:
    drawn = rows([result("error", what="word " * 20, fix="mend it")], height=9)
    words = " ".join(["word"] * 10)
    assert [line.strip(" ✗") for line in drawn[1:]] == [f"data  {words}", words, "→ mend it"]


def test_a_recipe_that_is_wrong_is_not_called_ready() -> None:
    assert rows([], problem="train.lr is 0")[1] == "  ✗ train.lr is 0"
    assert rows([]) == [rows([])[0]]
    assert "ready" not in rows([])[0]


def test_the_gravest_of_several_results_stands_beside_a_field() -> None:
    fields = Draft(TEXT, name="tiny.toml").fields()
    found = [
        result("warning", "task.data", "slow"),
        result("error", "task.data", "gone", "look for it"),
        result("ok", "train.task"),
        result("note", "cluster.nodes[0].cpu_ranks", "many"),
        result("error", "", "of no field"),
    ]
    assert ValidatedRecipe(settings=(), results=tuple(found)).messages(fields) == {
        "task.data": FieldMessage("gone; look for it", "error"),
        "cluster.nodes[0].cpu_ranks": FieldMessage("many", "note"),
    }


@pytest.mark.parametrize(("status", "mark"), [("error", "!"), ("warning", "!"), ("note", " ")])
def test_a_remark_takes_the_place_of_the_help(status: str, mark: str) -> None:
    field = next(field for field in Draft(TEXT, name="tiny.toml").fields() if field.key == "task.data")
    text = row_text(draw_field(field, 100, FieldMessage("gone", status)))  # type: ignore[arg-type]
    assert text[1] == mark
    assert text.rstrip().endswith("gone")


# The screen


@in_loop
async def test_missing_data_is_reported_once_its_name_is_entered() -> None:
    async with open_launch_screen() as (app, pilot, screen):
        assert "preflight  ✓ ready" in screen_text(app)
        screen.form.focus()
        screen.form.go_to("task.data")
        await pilot.press("enter", "x")
        await settle(pilot)
        assert "preflight  ✓ ready" in screen_text(app), "what is being typed is not the recipe yet"
        assert screen.draft is not None
        assert not screen.draft.changes
        await pilot.press("enter")
        await settle(pilot)
        assert "x does not exist; set task.data to its path" in screen_text(app)
        assert "preflight  ✗ 1 error" in screen_text(app)


@in_loop
async def test_an_error_blocks_the_launch_with_its_line() -> None:
    async with open_launch_screen() as (app, pilot, screen):
        await set_field(pilot, screen, "task.data", "nowhere.bin")
        field = next(row for row in screen_text(app).splitlines() if "! data" in row)
        assert "nowhere.bin does not exist" in field
        assert "preflight  ✗ 1 error" in screen_text(app)
        assert "2 ranks on 1 node" in screen_text(app), "the plan can be seen all the same"
        await pilot.press("L")
        await settle(pilot)
        assert app.place == "launch"
        assert toasts(app) == ["not launched: 1 error"]
        assert "nowhere.bin does not exist" in screen_text(app)
        assert list_runs() == []


@in_loop
async def test_the_notice_of_a_refused_launch_covers_neither_the_preflight_nor_the_field() -> None:
    async with open_launch_screen(size=(80, 24)) as (app, pilot, screen):
        await set_field(pilot, screen, "task.data", "nowhere.bin")
        preflight = screen.query_one("#readiness").region
        before = screen_text(app).splitlines()[preflight.y : preflight.bottom]
        await pilot.press("L")
        await settle(pilot)
        after = screen_text(app).splitlines()
        assert toasts(app) == ["not launched: 1 error"]
        assert "✗ 1 error" in before[0]
        assert after[preflight.y : preflight.bottom] == before
        assert any("! data" in row for row in after)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("text", ["saved tiny.toml", "a long reason " * 30, "one\ntwo\nthree"])
@in_loop
async def test_a_notice_covers_no_part_of_the_page_and_is_whole(size: tuple[int, int], text: str) -> None:
    async with open_launch_screen(size=size) as (app, pilot, screen):
        before = screen.query_one("#workspace").region
        app.report(text, alarm=True)
        await settle(pilot)
        (toast,) = screen.query("Toast")
        page = screen.query_one("#workspace").region
        assert not toast.region.overlaps(page)
        assert not toast.region.overlaps(screen.query_one("ScreenTabs").region)
        assert page.bottom == before.bottom
        shown = " ".join(row[toast.region.x :].strip("▌ ") for row in screen_text(app).splitlines()[1 : page.y])
        assert shown.split() == text.split()
        if text.startswith("saved"):
            assert page == before, "a line of notice moves nothing"


@in_loop
async def test_a_launch_checks_the_port_anew_and_names_its_holder() -> None:
    async with open_launch_screen() as (app, pilot, screen):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            await set_field(pilot, screen, "cluster.port", str(taken.getsockname()[1]))
            taken.listen()
            await pilot.press("L")
            await settle(pilot)
        assert app.place == "launch"
        assert toasts(app) == ["not launched: 1 error"]
        assert "is in use by" in screen_text(app)


@in_loop
async def test_a_warning_leaves_the_recipe_ready(folder: Path) -> None:
    with small_file_system(folder / "kept", "200m"):
        async with open_launch_screen() as (app, pilot, screen):
            await set_field(pilot, screen, "train.save_dir", "kept")
            assert "preflight  ! ready, 1 warning" in screen_text(app)


@in_loop
async def test_the_commands_of_nodes_elsewhere_are_copied(folder: Path) -> None:
    (folder / "recipes" / "tiny.toml").write_text(
        TEXT.replace("[[cluster.nodes]]", '[[cluster.nodes]]\nhost = "192.0.2.7"')
    )
    async with open_launch_screen() as (app, pilot, _):
        await pilot.press("c")
        assert "# node 0, 192.0.2.7" in app.clipboard


def test_other_hosts_are_queried_once_during_edits_and_again_by_a_launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ssh").write_text(f"#!/bin/sh\necho >> {folder}/queries\necho 'ssh: no route to host' >&2\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("GPUTRAIN_SSH", str(folder / "ssh"))
    node = '[[cluster.nodes]]\nhost = "192.0.2.7{}"\ncpu_ranks = 1\n'
    text = f"{node.format(1)}{node.format(2)}[train]{TEXT.partition('[train]')[2]}"
    queries = []
    for settings, age_s in (([], 60.0), (["train.lr=0.5"], 60.0), ([], 0.0)):
        found = validate_recipe(text, name="far.toml", settings=settings, hosts_max_age_s=age_s)
        assert found.prepared is None
        queries.append(len((folder / "queries").read_text().splitlines()))
        errors = [each for each in found.results if each.status == "error"]
        assert [(each.host, each.key) for each in errors] == [
            ("192.0.2.71", "cluster.nodes[0].host"),
            ("192.0.2.72", "cluster.nodes[1].host"),
        ]
    assert queries == [2, 2, 4]
    drawn = rows(found.results, width=99)[1]
    assert drawn.startswith("  ✗ ssh  192.0.2.71: there is no route to it from here → `ssh 192.0.2.71 python3")
