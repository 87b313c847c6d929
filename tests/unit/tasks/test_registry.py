"""A task is found by its built-in name, in a module, or in a file of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.builtin_tasks import BUILT_IN, check_data, options_schema
from trainer.contract.errors import RequestError
from trainer.tasks.registry import is_same_task, load_task
from trainer.tasks.task import Task

OWN = """
from torch import nn
from trainer.tasks.task import Task
from neighbour import WIDTH

class Mine(Task):
    def model(self):
        return nn.Linear(WIDTH, 1)

class NotOne:
    pass
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_loads_with_the_options_that_the_registry_shows(name: str) -> None:
    task = load_task(name)
    assert issubclass(task, Task)
    assert task.Options is options_schema(name)


def test_a_task_in_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    task = load_task(f"{tmp_path}/mine.py:Mine")
    assert task(task.Options()).model().in_features == 3
    assert load_task(f"{tmp_path}/mine.py:Mine") is task
    assert options_schema(f"{tmp_path}/mine.py:Mine") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("mine.py:Mine", "/home/me/mine.py:Mine", True),
        ("mine.py:Mine", "package.mine:Mine", True),
        ("lm", "trainer.tasks.lm:LanguageModel", True),
        ("lm", "docnn", False),
        ("mine.py:Mine", "mine.py:Other", False),
        ("mine.py:Mine", "own.py:Mine", False),
        ("", "lm", False),
    ],
)
def test_a_task_is_the_same_in_another_folder(one: str, other: str, same: bool) -> None:
    assert is_same_task(one, other) is is_same_task(other, one) is same


def test_a_task_in_a_module_is_loaded() -> None:
    assert load_task("trainer.tasks.lm:LanguageModel") is load_task("lm")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no task is named"),
        ("docn", "did you mean 'docnn'?"),
        ("transformer", "lm, docnn, mnist, masked_lm, or your own as package.module:Class or path/to/file.py:Class"),
        ("no.such.module:Task", "'no.such.module' is not found"),
        ("trainer.tasks.lm:LanguageModl", "did you mean 'LanguageModel'?"),
        ("trainer.tasks.lm:Decoder", "must be a subclass of trainer.tasks.task.Task"),
        ("{tmp}/absent.py:Mine", "absent.py does not exist"),
        ("{tmp}/mein.py:Mine", "mein.py does not exist; did you mean 'mine.py'?"),
        ("{tmp}/mine.py:Other", "its tasks are Mine"),
        ("{tmp}/mine.py:NotOne", "must be a subclass"),
        ("{tmp}/broken.py:Mine", "broken.py, line 1"),
        ("{tmp}/lonely.py:Mine", "No module named 'no_such_neighbour'"),
        ("{tmp}/inner.py:Mine", "name it as one, such as {tmp.name}.inner:Class, in the folder that holds {tmp.name}"),
    ],
)
def test_a_task_that_cannot_be_had_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace("from neighbour import WIDTH", "WIDTH = 1"))
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    (tmp_path / "lonely.py").write_text("import no_such_neighbour\n")
    (tmp_path / "inner.py").write_text("from .mine import Mine\n")
    with pytest.raises(RequestError) as refused:
        load_task(name.format(tmp=tmp_path))
    assert message.format(tmp=tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_names_are_refused_without_loading_anything() -> None:
    with pytest.raises(RequestError, match="did you mean 'mnist'"):
        options_schema("mnis")


def test_missing_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    schema = options_schema("mnist")
    assert schema is not None
    with pytest.raises(RequestError, match="lacks train-images-idx3-ubyte"):
        check_data(schema(data=str(tmp_path)))
    check_data(object())  # the options of a user's own task are unknown without torch
