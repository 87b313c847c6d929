"""The README's commands, recipes and example of a task are what they claim to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gputrain_tui.recipe.build import build

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_two_commands_come_first_and_are_complete() -> None:
    run, tests = blocks("sh")[:2]
    for command in (run, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "gputrain run recipes/demo.toml" in run
    assert "pytest" in tests


def test_the_example_of_a_task_is_under_thirty_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) < 30


@pytest.mark.parametrize("recipe", blocks("toml"), ids=lambda recipe: recipe.splitlines()[0])
def test_every_recipe_is_one(recipe: str) -> None:
    assert build(recipe, name="README.md").cluster.nodes
