"""What ``pyproject.toml`` declares agrees with the package, and with itself."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from documents import ROOT

from gputrain_tui import VERSION
from gputrain_tui.help_topics import read_topic
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.new_recipe import SCRIPT, example_names, example_text, examples_folder
from trainer.contract.errors import RequestError

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def of_group(name: str) -> list[str]:
    """Return the requirements of a dependency group, with those of the groups that it includes."""
    entries: list[Any] = PYPROJECT["dependency-groups"][name]
    return [
        line for entry in entries for line in ([entry] if isinstance(entry, str) else of_group(entry["include-group"]))
    ]


def test_the_extra_for_tests_is_the_dependency_group() -> None:
    assert PROJECT["optional-dependencies"]["test"] == of_group("test")


def test_the_version_stands_once_and_the_changelog_begins_with_it() -> None:
    assert "version" in PROJECT["dynamic"]
    headings = [line for line in read_topic("changelog").markdown.splitlines() if line.startswith("## ")]
    assert headings[0] == f"## {VERSION}"


def test_the_licence_is_named_in_spdx_and_its_text_ships() -> None:
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_the_hooks_before_a_commit_are_commands_of_the_tests_environment() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for command in (".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"):
        assert f"entry: {command}" in hooks
        assert command in ci


@pytest.mark.parametrize("name", example_names())
def test_an_example_is_a_recipe_that_names_nothing_of_the_repository(name: str) -> None:
    text = example_text(name, file=f"{name}.toml", script=SCRIPT)
    assert "recipes/" not in text
    assert "#:schema" not in text
    recipe = build(text, name=f"{name}.toml")
    if recipe.script is not None:
        assert recipe.script.script == SCRIPT
        assert (examples_folder() / SCRIPT).is_file()


def test_an_unknown_example_is_refused_with_the_nearest_one_or_all() -> None:
    with pytest.raises(RequestError, match=r"^init: 'mnits' is not an example; did you mean 'mnist'\?$"):
        example_text("mnits", file="", script="")
    with pytest.raises(RequestError, match=r"^init: '\.\./x' is not an example; there are demo, "):
        example_text("../x", file="", script="")
