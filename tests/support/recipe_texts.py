"""Recipes from a few lines of TOML, and the one-line message for a wrong one."""

from __future__ import annotations

import pytest

from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.form_fields import Field
from gputrain_tui.recipe.model import Recipe
from trainer.contract.errors import RequestError

CPUS = "cpu_ranks = 2"
TRAIN = 'task = "lm"\nmax_updates = 2'


def recipe(*nodes: str, train: str = TRAIN, task: str = 'data = "books.txt"', cluster: str = "") -> Recipe:
    tables = "\n".join(f"[[cluster.nodes]]\n{node}" for node in nodes or (CPUS,))
    own = f"[task]\n{task}\n" if task else ""
    return build(f"[cluster]\n{cluster}\n{tables}\n[train]\n{train}\n{own}", name="one.toml")


def recipe_of(text: str, *settings: str) -> Recipe:
    return build(text, name="r.toml", overrides=settings)


def refusal(text: str, *settings: str, name: str = "r.toml") -> str:
    with pytest.raises(RequestError) as caught:
        build(text, name=name, overrides=settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


DRAFT_TEXT = """# What it is for.
name = "one"

[[cluster.nodes]]
cpu_ranks = 2           # two of them

[train]
task = "lm"
lr = 0.1                # high

[task]
data = "stdlib"
"""


def draft(text: str = DRAFT_TEXT) -> Draft:
    return Draft(text, name="one.toml")


def field(draft: Draft, key: str) -> Field:
    return next(field for field in draft.fields() if field.key == key)
