from __future__ import annotations

from pathlib import Path

import pytest
from recipe_texts import DRAFT_TEXT, draft, field

from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.files import complete_path, recipe_files
from gputrain_tui.recipe.form_fields import find_field, message_key, strip_location
from gputrain_tui.recipe.toml_writer import dump_toml
from trainer.contract.errors import RequestError


def test_every_option_is_a_field_with_help_and_group() -> None:
    fields = draft().fields()
    keys = [field.key for field in fields]
    assert len(keys) == len(set(keys)) > 70
    assert {"name", "train.task", "task.dim", "cluster.nodes[0].gpus", "cluster.port", "train.lr"} <= set(keys)
    assert all(field.option.help and field.group for field in fields)


def test_a_field_shows_the_written_value_and_else_the_default() -> None:
    lr, seed = field(draft(), "train.lr"), field(draft(), "train.seed")
    assert (lr.text, lr.written, lr.changed) == ("0.1", True, False)
    assert (seed.text, seed.written, seed.changed) == ("1", False, False)


def test_a_change_is_saved_and_keeps_comments() -> None:
    one = draft()
    one.set("train.lr", "0.5")
    one.set("task.dim", "64")
    assert field(one, "train.lr").changed
    recipe = build(one.text, name=one.name, overrides=one.settings)
    assert (recipe.train.lr, recipe.task_options["dim"]) == ((0.5,), 64)
    saved = dump_toml(recipe)
    assert "# What it is for." in saved
    assert "# two of them" in saved
    one.mark_saved(saved, name="two.toml")
    assert not one.changes
    assert field(one, "train.lr").text == "0.5"


def test_setting_the_devices_of_a_node_clears_the_other_two_keys() -> None:
    one = draft()
    one.set("cluster.nodes[0].gpus", "0, 1")
    assert field(one, "cluster.nodes[0].gpus").text == "0, 1"
    assert not field(one, "cluster.nodes[0].cpu_ranks").written
    recipe = build(one.text, name=one.name, overrides=one.settings)
    assert recipe.cluster.nodes[0].gpus == (0, 1)
    one.reset("cluster.nodes[0].gpus")
    assert field(one, "cluster.nodes[0].cpu_ranks").text == "2"
    assert not one.changes


def test_nodes_can_be_added_and_removed_but_for_the_last() -> None:
    one = draft()
    assert one.add_node() == 1
    one.set("cluster.nodes[1].host", "n1")
    one.set("cluster.nodes[0].host", "n0")
    recipe = build(one.text, name=one.name, overrides=one.settings)
    assert [(node.host, node.cpu_ranks) for node in recipe.cluster.nodes] == [("n0", 2), ("n1", 2)]
    assert one.remove_node(0)
    assert not one.remove_node(0)


def test_resetting_takes_back_the_change_first_and_then_the_written_value() -> None:
    one = draft()
    one.set("train.lr", "0.5")
    one.reset("train.lr")
    assert field(one, "train.lr").text == "0.1"
    one.reset("train.lr")
    assert not field(one, "train.lr").written
    assert "# What it is for." in one.text


def test_an_empty_value_means_the_default() -> None:
    one = draft()
    one.set("train.lr", "")
    assert not field(one, "train.lr").written


def test_an_empty_value_of_a_node_removes_only_that_key() -> None:
    one = draft(DRAFT_TEXT.replace("[[cluster.nodes]]", '[[cluster.nodes]]\nhost = "n0"\nworkdir = "/w"'))
    one.set("cluster.nodes[0].cpu_ranks", "3")
    one.set("cluster.nodes[0].workdir", "")
    assert one.nodes() == [{"host": "n0", "cpu_ranks": 3}]
    assert one.undo() == "cluster.nodes[0].workdir"
    assert one.nodes() == [{"host": "n0", "workdir": "/w", "cpu_ranks": 3}]


@pytest.mark.parametrize(
    "text", [DRAFT_TEXT, '[train]\ntask = "lm"\n', '{"train": {"task": "lm"}, "cluster": {"nodes": [{"gpus": 2}]}}']
)
def test_adding_and_removing_a_node_is_no_change(text: str) -> None:
    one = draft(text)
    one.remove_node(one.add_node() - 1)
    one.remove_node(one.add_node())
    assert not one.changes


@pytest.mark.parametrize(
    ("key", "text"),
    [("train.lr", "0.1"), ("cluster.nodes[0].cpu_ranks", "2"), ("name", "one"), ("train.seed", "")],
)
def test_setting_the_written_value_is_no_change(key: str, text: str) -> None:
    one = draft()
    one.set(key, "9")
    one.set(key, text)
    assert not one.changes


def test_every_edit_can_be_undone_until_it_is_saved() -> None:
    one = draft()
    one.set("train.lr", "0.5")
    one.reset("task.data")
    one.add_node()
    one.set_gpus(0, (1, 2))
    one.remove_node(1)
    one.set("train.lr", "0.5")
    assert [one.undo() for _ in range(6)] == [
        "cluster.nodes[0].host", "cluster.nodes[0].gpus", "cluster.nodes[0].host", "task.data", "train.lr", None,
    ]  # fmt: skip
    assert (one.text, one.changes) == (DRAFT_TEXT, {})
    one.set("train.lr", "0.5")
    one.mark_saved(DRAFT_TEXT, name="one.toml")
    assert one.undo() is None


def test_the_last_key_of_slurm_goes_with_its_table_which_alone_would_submit_the_run() -> None:
    one = draft(DRAFT_TEXT + '\n[slurm]\npartition = "gpu"\n')
    assert field(one, "slurm.partition").text == "gpu"
    one.set("slurm.partition", "")
    assert build(one.text, name=one.name, overrides=one.settings).slurm is None


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("cluster.env", "A=1 B='two words'", ""),
        ("cluster.env", "A=1 B", "must be NAME=VALUE"),
        ("cluster.env", "A='1", "must be NAME=VALUE"),
        ("cluster.env", "MASTER_PORT=1", "is computed"),
        ("cluster.nodes[0].env", "1A=2", "not a valid name of an environment variable"),
        ("slurm.nodes", "0", ">= 1"),
        ("train.lr", "0.5", ""),
        ("train.lr", "-1", "one or more numbers > 0"),
        ("train.lr", "high", "one or more numbers > 0"),
        ("train.batch_size", "8, 4", ""),
        ("train.batch_size", "0", "integers >= 1"),
        ("train.optimizer", "adan", "did you mean"),
        ("train.adam_betas", "0.9", "2 numbers"),
        ("train.distributed_timeout", "0", "> 0"),
        ("task.dim", "wide", "an integer"),
        ("cluster.port", "70000", "<= 65535"),
        ("cluster.nodes[0].gpus", "free", ""),
        ("cluster.nodes[0].gpus", "fre", "did you mean"),
        ("cluster.nodes[0].gpus", "0, x", "a list of device ids"),
        ("cluster.nodes[0].cpu_ranks", "0", ">= 1"),
        ("name", "any name", ""),
    ],
)
def test_a_value_is_checked_as_it_is_typed(key: str, text: str, message: str) -> None:
    one = draft()
    problem = one.problem(field(one, key), text)
    assert message in problem
    assert bool(message) == bool(problem)


@pytest.mark.parametrize(
    ("message", "key", "rest"),
    [
        ("--set train.lr is 'x', but must be a number", "train.lr", "is 'x', but must be a number"),
        ("a/b.toml:3: train.lr is 'x'", "train.lr", "is 'x'"),
        ("b.toml: cluster.nodes[1].gpus names GPU 0", "cluster.nodes[1].gpus", "names GPU 0"),
        ("b.toml:4: cluster.nodes[0] has gpus and ranks", "cluster.nodes[0]", "has gpus and ranks"),
        ("port 29600 is taken by python", "", "port 29600 is taken by python"),
    ],
)
def test_a_message_is_put_beside_its_field(message: str, key: str, rest: str) -> None:
    assert (message_key(message), strip_location(message)) == (key, rest)


def test_a_message_about_a_table_stands_at_its_first_field() -> None:
    found = find_field(draft().fields(), "cluster.nodes[0]")
    assert found is not None
    assert found.key == "cluster.nodes[0].host"
    assert find_field(draft().fields(), "") is None


def test_a_script_has_its_own_fields() -> None:
    one = draft('[train]\nscript = "train.py"\nargs = ["--x", "1"]\n')
    assert field(one, "train.script").text == "train.py"
    assert field(one, "train.args").text == "--x, 1"
    assert not [field for field in one.fields() if field.group == "Task"]


def test_text_that_is_no_recipe_is_refused() -> None:
    with pytest.raises(RequestError, match="is not valid TOML"):
        draft("[train\n")


def test_a_path_is_completed_as_far_as_all_files_agree(tmp_path: Path) -> None:
    (tmp_path / "data" / "books").mkdir(parents=True)
    for name in ("text.txt", "texts.txt", ".hidden"):
        (tmp_path / name).touch()
    for text, completed, names in (
        ("da", "data/", ["data/"]),
        ("data/", "data/books/", ["books/"]),
        ("te", "text", ["text.txt", "texts.txt"]),
        ("text.", "text.txt", ["text.txt"]),
        (".h", ".hidden", [".hidden"]),
        ("none", "none", []),
        ("none/x", "none/x", []),
    ):
        assert complete_path(text, tmp_path) == (completed, names)
    assert complete_path(f"{tmp_path}/da", Path("/")) == (f"{tmp_path}/data/", ["data/"])


def test_recipes_are_found_in_the_folder_and_in_ones_own(tmp_path: Path) -> None:
    (tmp_path / "here" / "recipes").mkdir(parents=True)
    (tmp_path / "own" / "recipes").mkdir(parents=True)
    (tmp_path / "here" / "recipes" / "a.toml").write_text(DRAFT_TEXT)
    (tmp_path / "here" / "b.toml").write_text('[train]\ntask = "lm"\n')
    (tmp_path / "here" / "broken.toml").write_text("[train]\nlr = \n")
    (tmp_path / "here" / "mistyped.toml").write_text('[train]\ntask = "lm"\n[tasks]\ndata = "stdlib"\n')
    (tmp_path / "here" / "other.toml").write_text("[train]\nepochs = 3\n[model]\ndepth = 2\n")
    (tmp_path / "here" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (tmp_path / "own" / "recipes" / "c.toml").write_text(DRAFT_TEXT.replace("one", "mine"))
    found = recipe_files(tmp_path / "here", tmp_path / "own")
    assert [(file.group, file.name) for file in found] == [
        ("recipes/", "one"),
        ("this folder", "b"),
        ("this folder", "broken"),
        ("this folder", "mistyped"),
        ("yours", "mine"),
    ]


def test_recipes_of_one_name_are_listed_by_their_files(tmp_path: Path) -> None:
    for stem in ("one", "two", "three"):
        name = "other" if stem == "three" else "one"
        (tmp_path / f"{stem}.toml").write_text(f'name = "{name}"\n[train]\ntask = "lm"\n')
    found = recipe_files(tmp_path, tmp_path / "own")
    assert {file.path.stem: file.name for file in found} == {"one": "one", "two": "two", "three": "other"}
