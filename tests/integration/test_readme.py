"""The commands, recipes and examples of the README and of the help are what they claim to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, README, ROOT, blocks

from gputrain_tui.cli import COMMANDS
from gputrain_tui.console.actions import ACTIONS
from gputrain_tui.help_topics import FOLDER, ORDER
from gputrain_tui.recipe.build import build

RECIPES = [(name, recipe) for name in DOCUMENTS for recipe in blocks(name, "toml")]
PAGES = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("trainer", "gputrain_tui", "tests")),
    *FOLDER.glob("*.md"),
]
SECTIONS = [
    "Install", "The demo", "Your script, unchanged", "Your own model", "The console", "Several machines", "Slurm",
    "A run goes wrong", "Which command", "Reference",
]  # fmt: skip


def test_the_two_commands_come_first_and_are_complete() -> None:
    run, tests = blocks("README", "sh")[:2]
    for command in (run, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "gputrain run recipes/demo.toml" in run
    assert "pytest" in tests


def test_the_readme_can_be_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 250
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == SECTIONS


def test_the_first_screen_of_the_readme_says_what_has_run_on_a_gpu() -> None:
    assert "On a GPU" in README.partition("\n## ")[0]


def test_the_readme_leads_to_every_command_and_topic() -> None:
    table = README.partition("## Which command")[2]
    for command in COMMANDS:
        assert f"`gputrain {command}" in table or command in ("attach", "completion"), command
    for topic in ORDER:
        assert f"(gputrain_tui/help/{topic}.md)" in README.partition("## Reference")[2]


def test_the_readmes_keys_are_keys_of_the_console() -> None:
    rows = re.findall(r"^\| ((?:`[^`]+` ?)+) \|", README.partition("## The console")[2].partition("\n## ")[0], re.M)
    keys = re.findall(r"`([^`]+)`", " ".join(rows))
    assert len(rows) == 10
    assert set(keys) <= {action.key_text for action in ACTIONS}


def test_the_example_of_a_task_is_under_thirty_lines() -> None:
    example = blocks("tasks", "python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) < 30
    assert blocks("README", "python") == [example]


@pytest.mark.parametrize("language", ["shell", "sh slurm"])
def test_what_the_labs_run_of_the_readme_stands_in_a_topic_too(language: str) -> None:
    topics = {block for name in ORDER for block in blocks(name, language)}
    assert topics.issuperset(blocks("README", language))


@pytest.mark.parametrize(("page", "recipe"), RECIPES, ids=[f"{name} {text.splitlines()[0]}" for name, text in RECIPES])
def test_every_recipe_is_one(page: str, recipe: str) -> None:
    assert build(recipe, name=f"{page}.md").cluster.nodes


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_every_link_to_a_file_leads_to_one(path: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("package", ["trainer", "gputrain_tui"])
def test_the_page_of_a_package_names_files_that_exist(package: str) -> None:
    text = (ROOT / package / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", text)
    assert [name for name in named if not ((ROOT / package / name).exists() or (ROOT / name).exists())] == []
    rooms = {path.name for path in (ROOT / package).iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert [room for room in rooms if f"`{room}/`" not in text] == []


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_command_that_is_named_exists(page: str) -> None:
    typed = "".join(block for language in ("sh", "shell", "sh slurm") for block in blocks(page, language))
    named = re.findall(r"`gputrain ([a-z][a-z-]*)\b", DOCUMENTS[page]) + re.findall(
        r"^gputrain ([a-z][a-z-]*)\b", typed, re.M
    )
    assert set(named) <= set(COMMANDS)
    topics = re.findall(r"`gputrain help ([a-z-]+)`", DOCUMENTS[page])
    assert set(topics) <= set(ORDER)
