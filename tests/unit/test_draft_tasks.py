"""A draft whose task is changed, of a script, and with values of any characters."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from random import Random

import pytest
from recipe_texts import DRAFT_TEXT, draft, field

from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.new_recipe import from_text
from gputrain_tui.recipe.source import override, parse
from gputrain_tui.recipe.toml_writer import dump_toml
from gputrain_tui.recipe.values import value_text
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.contract.schema import describe

# The task is changed


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("task", ["mnist", "masked_lm", "docnn", "mlp.py:Mlp"])
def test_another_task_begins_with_its_defaults_and_undo_brings_the_former_keys_back(task: str, as_json: bool) -> None:
    one = draft(json.dumps(tomllib.loads(DRAFT_TEXT)) if as_json else DRAFT_TEXT)
    assert one.set("task.dim", "64") == []
    before = one.text, one.settings, [(field.key, field.text) for field in one.fields()]
    assert set(one.set("train.task", task)) == {"task.data", "task.dim"}
    assert not override(parse(one.text, name="one.toml").data, one.settings)[0].get("task")
    assert field(one, "train.lr").text == "0.1"
    assert one.undo() == "train.task"
    assert (one.text, one.settings, [(field.key, field.text) for field in one.fields()]) == before


def test_the_way_to_a_task_leaves_no_trace() -> None:
    """The keys of a recipe after lm → docnn → masked_lm are those after lm → masked_lm."""
    one, other = draft(), draft()
    for task in ("docnn", "mnist", "masked_lm"):
        one.set("train.task", task)
    other.set("train.task", "masked_lm")
    assert (one.text, one.settings) == (other.text, other.settings)


def test_a_saved_recipe_of_another_task_has_the_comments_and_not_the_former_keys() -> None:
    one = draft()
    one.set("train.task", "mnist")
    one.set("task.data", "digits")
    saved = dump_toml(build(one.text, name=one.name, overrides=one.settings))
    assert "dim" not in saved
    assert "# two of them" in saved
    one.mark_saved(saved, name="two.toml")
    assert field(one, "task.data").text == "digits"


def test_a_wrong_key_of_the_file_itself_is_shown_and_can_be_removed() -> None:
    one = draft(DRAFT_TEXT + "dimm = 3\n")
    assert field(one, "task.dimm").text == "3"
    one.reset("task.dimm")
    build(one.text, name=one.name, overrides=one.settings)


def test_a_script_shows_no_field_that_only_a_task_has() -> None:
    one = draft('[train]\nscript = "train.py"\nargs = ["--x", "1"]\n')
    names = {option.name for option in describe(Training)}
    assert not [found.key for found in one.fields() if found.key.startswith("train.") and found.name in names]
    for found in one.fields():
        if found.key.startswith("train.") and found.values:
            one.set(found.key, found.values[0])
    build(one.text, name=one.name, overrides=one.settings)


def test_a_key_that_a_script_does_not_take_is_shown_where_the_file_has_it() -> None:
    one = draft('[train]\nscript = "train.py"\nlr = 0.1\n')
    assert field(one, "train.lr").text == "0.1"
    one.reset("train.lr")
    build(one.text, name=one.name, overrides=one.settings)


def test_without_its_script_a_recipe_may_get_a_task() -> None:
    text = '[train]\nscript = "train.py"\nargs = ["--x", "1"]\n'
    one = draft(text)
    assert one.set("train.script", "") == ["train.args"]
    with pytest.raises(RequestError, match=r"train\.task is missing: .*mnist"):
        build(one.text, name=one.name, overrides=one.settings)
    one.set("train.task", "mnist")
    one.set("task.data", "digits")
    assert build(one.text, name=one.name, overrides=one.settings).train.task == "mnist"
    assert [one.undo(), one.undo(), one.undo(), one.text] == ["task.data", "train.task", "train.script", text]


# New keys and tables in the text

COMMENTED = """# head
name = "x"

# about train
[train]
task = "lm"
lr = 0.1 # high
# below lr

# about report
[report]
tensorboard = true
"""
COMPLETED = """# head
name = "x"

# about train
[train]
task = "lm"
lr = 0.1 # high
# below lr
max_epochs = 3

# about report
[report]
tensorboard = true

[[cluster.nodes]]
ranks = 2

[task]
data = "stdlib"
"""


def _saved(one: Draft, *settings: tuple[str, str]) -> str:
    for key, value in settings:
        one.set(key, value)
    return dump_toml(build(one.text, name=one.name, overrides=one.settings))


def test_new_keys_stand_in_their_table_new_tables_at_the_end_and_comments_where_they_were() -> None:
    changes = (("task.data", "stdlib"), ("cluster.nodes[0].ranks", "2"), ("train.max_epochs", "3"))
    assert _saved(draft(COMMENTED), *changes) == COMPLETED
    assert _saved(draft(COMMENTED.rstrip("\n")), *changes) == COMPLETED


def test_the_task_of_a_new_recipe_stands_before_the_comments_about_reports() -> None:
    text = from_text("lm").text(file="lm.toml")
    saved = _saved(draft(text), ("task.data", "stdlib"), ("train.lr", "0.2"))
    before, comments = text.split("\n# [report]")
    assert saved == f'{before}lr = 0.2\n\n[task]\ndata = "stdlib"\n\n# [report]{comments}'


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_recipe_keeps_each_comment_whatever_is_changed(path: Path) -> None:
    text = path.read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for found in draft(text).fields():
        if found.key in ("train.task", "train.script") or found.written or not (values := found.values):
            continue
        one = draft(text)
        one.set(found.key, values[-1] if values[-1] != found.text else values[0])
        try:
            recipe = build(one.text, name=one.name, overrides=one.settings)
        except RequestError:
            continue
        saved = dump_toml(recipe)
        assert [line for line in saved.splitlines() if line.startswith("#")] == comments
        again = build(saved, name=one.name)
        assert (again.train, again.cluster, again.slurm) == (recipe.train, recipe.cluster, recipe.slurm)
        assert (again.task_options, again.report) == (recipe.task_options, recipe.report)


# Text as typed

ANY_CHARACTERS = "aZ0 \"'\\#=[]{},.\t\x7f\x1béß…日🙂👩\U0010ffff\u2028\x85"


def test_any_text_is_saved_as_typed() -> None:
    random = Random(27)
    texts = ["🙂", "rené 🚀", "\\ud83d", '"', "true", "1e3", "[1]", "\x7f"]
    texts += ["".join(random.choices(ANY_CHARACTERS, k=random.randint(1, 12))) for _ in range(300)]
    for text in texts:
        one = draft()
        one.set("task.data", text)
        recipe = build(one.text, name=one.name, overrides=one.settings)
        assert recipe.task_options["data"] == text
        one.mark_saved(dump_toml(recipe), name="one.toml")
        assert field(one, "task.data").value == text
        one.set("cluster.env", f"A={shlex.quote(text)}")
        assert build(one.text, name=one.name, overrides=one.settings).cluster.env == {"A": text}


def test_a_list_of_texts_is_shown_as_typed() -> None:
    assert value_text(["a b", "é, 🙂"]) == '["a b", "é, 🙂"]'
