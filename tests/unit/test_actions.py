from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable

import pytest
from row_texts import row_text
from textual.screen import Screen

from gputrain_tui.console import screens
from gputrain_tui.console.actions import (
    ACTIONS,
    EVERYWHERE,
    Action,
    bindings,
    footer,
    footer_of_focus,
    groups,
    of_place,
)
from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.screens.help_screen import WITH_LOG, help_text
from gputrain_tui.console.widgets.drawing import row_cells
from gputrain_tui.console.widgets.findings import Findings
from gputrain_tui.console.widgets.key_bar import draw_keys
from gputrain_tui.console.widgets.log_view import LogView
from gputrain_tui.console.widgets.stack_view import GroupsView


def places() -> dict[str, type]:
    """Every place of the table with the class that has its actions."""
    found: dict[str, type] = {EVERYWHERE: GputrainApp, "log": LogView, "findings": Findings, "text": GroupsView}
    for module in pkgutil.iter_modules(screens.__path__):
        loaded = importlib.import_module(f"{screens.__name__}.{module.name}")
        for _, value in inspect.getmembers(loaded, inspect.isclass):
            if issubclass(value, Screen) and isinstance(place := getattr(value, "PLACE", None), str):
                found[place] = value
    return found


def clashes(actions: Iterable[Action] = ACTIONS) -> list[tuple[str, str, str]]:
    found = []
    seen: dict[tuple[str, str], str] = {}
    every = list(actions)
    places = {place for action in every for place in action.places} - {EVERYWHERE}
    for place in sorted(places):
        for action in every:
            if place not in action.places and EVERYWHERE not in action.places:
                continue
            for key in action.keys:
                other = seen.setdefault((place, key), action.name)
                if other != action.name:
                    found.append((key, other, action.name))
    return found


def test_no_key_means_two_things_on_one_screen() -> None:
    assert clashes() == []


def test_a_clash_is_found() -> None:
    one = Action(name="one", keys=("x",), label="", description="", group="", places=("run",))
    two = Action(name="two", keys=("y", "x"), label="", description="", group="", places=("app",))
    assert clashes((one, two)) == [("x", "one", "two")]


@pytest.mark.parametrize(
    ("key", "names"),
    [("r", {"resume"}), ("k", {"scroll_lines(-1)"}), ("j", {"scroll_lines(1)"}), ("G", {"follow"}), ("u", {"undo"})],
)
def test_usual_keys_have_one_meaning_wherever_they_are_bound(key: str, names: set[str]) -> None:
    assert {action.name for action in ACTIONS if key in action.keys} == names


def test_every_action_is_a_method_of_its_screen_or_of_the_app() -> None:
    known = places()
    for action in ACTIONS:
        namespace, _, name = action.name.partition("(")[0].rpartition(".")
        for place in action.places:
            owner = {"app": GputrainApp, "screen": ConsoleScreen}.get(namespace, known[place])
            assert hasattr(owner, f"action_{name}"), f"{place}: {action.name}"


def test_every_action_has_a_short_description() -> None:
    for action in ACTIONS:
        assert action.description[0].isupper()
        assert not action.description.endswith(".")
        assert len(action.description) < 80
        assert 0 < len(action.label) <= 20


def test_bindings_carry_the_table() -> None:
    assert {binding.action for binding in bindings("run")} == {action.name for action in of_place("run")}
    assert any(binding.key == "question_mark,f1" for binding in bindings(EVERYWHERE))


@pytest.mark.parametrize("place", ["run", "rank", "history"])
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_footer_fits_and_always_has_quit(place: str, width: int) -> None:
    row, spots = draw_keys(footer(place), width)
    assert row_cells(row) <= width
    assert "q Quit" in row_text(row)
    for begin, end, action in spots:
        assert row_text(row)[begin:end].startswith(action.key_text)


def test_after_the_end_of_a_run_the_footer_offers_the_next_actions() -> None:
    row, _ = draw_keys(footer("run", over=True), 120)
    assert "r Resume  e Edit and rerun  C Compare" in row_text(row)
    assert "Stop" not in row_text(row)
    row, _ = draw_keys(footer("run"), 120)
    assert "Resume" not in row_text(row)


def test_a_narrow_footer_folds_the_panels_to_their_keys() -> None:
    row, _ = draw_keys(footer("run"), 80)
    assert "l g b h f o Panels" in row_text(row)
    assert "S Stop" in row_text(row)
    row, _ = draw_keys(footer("run"), 200)
    assert "l Loss  g Sync  b Bars" in row_text(row)


@pytest.mark.parametrize("place", WITH_LOG)
def test_while_the_log_has_the_keys_the_footer_shows_its_own_and_none_that_it_takes(place: str) -> None:
    offered = footer_of_focus(place, "log")
    text = row_text(draw_keys(offered, 120)[0])
    assert text.startswith(" / Search  n Next match  L Level  end Follow")
    assert "Filter" not in text
    assert "q Quit" in text
    keys = [key for action in offered for key in action.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("width", "hints"), [(80, "1–4 Screens"), (120, "1–4 Screens"), (160, "1 Cluster  2 Launch")])
def test_the_footer_of_a_run_has_the_keys_of_the_other_screens(width: int, hints: str) -> None:
    row, spots = draw_keys(footer("run"), width)
    assert hints in row_text(row)
    assert {"go('cluster')", "go('history')"} <= {action.name for _, _, action in spots}


@pytest.mark.parametrize(
    "place", sorted({place for action in ACTIONS for place in action.places} - {EVERYWHERE, "log"})
)
def test_help_lists_every_key_of_the_screen(place: str) -> None:
    lines = help_text(place).plain.splitlines()
    for group, actions in groups(place).items():
        assert group in lines
        for action in actions:
            assert any(action.key_texts in line and line.endswith(action.description) for line in lines), action.name
    assert max(map(len, help_text(place, 60).plain.splitlines())) <= 60


@pytest.mark.parametrize("place", WITH_LOG)
def test_help_lists_the_keys_of_the_log_where_there_is_one(place: str) -> None:
    text = help_text(place).plain
    assert "Log, while focused" in text
    assert all(action.description in text for action in of_place("log"))


def test_no_action_of_the_table_is_missing_from_the_help() -> None:
    every = "\n".join(help_text(place).plain for place in places() if place != "log")
    assert [action.name for action in ACTIONS if action.description not in every] == []
