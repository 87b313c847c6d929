"""The options of the built-in tasks share one command line with the trainer's own, and are read without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed, Training
from trainer.contract.schema import check, describe


def build(task: str, **values: Any) -> Any:
    schema = options_schema(task)
    assert schema is not None
    return check(schema, values, where=lambda name: f"task.{name}")


@pytest.mark.parametrize("task", BUILT_IN)
def test_no_option_has_a_name_of_the_trainers(task: str) -> None:
    schema = options_schema(task)
    assert schema is not None
    taken = {option.flag for part in (Training, Distributed) for option in describe(part)}
    taken |= {alias for part in (Training, Distributed) for option in describe(part) for alias in option.aliases}
    for option in describe(schema):
        assert {option.flag, *option.aliases}.isdisjoint(taken), option.name
        assert option.help, option.name
        assert option.group, option.name


def test_options_and_data_are_checked_without_torch() -> None:
    code = (
        "import sys; from trainer.contract.builtin_tasks import BUILT_IN, check_data, options_schema; "
        "from trainer.contract.task_options import LmOptions; import trainer.tasks.registry; "
        "[options_schema(name) for name in BUILT_IN]; check_data(LmOptions(data='stdlib')); "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("lm", {}, "task.data is missing"),
        ("lm", {"data": "x", "contxt": 3}, "task.contxt is not known; did you mean 'context'?"),
        ("lm", {"data": "x", "context": 0}, "task.context is 0, but must be an integer >= 1"),
        ("lm", {"data": "x", "dim": 100, "heads": 3}, "heads is 3, but must divide dim, which is 100"),
        ("lm", {"data": "x", "dim": 9, "heads": 3}, "dim / heads is 3, but must be even"),
        (
            "lm",
            {"data": "x", "tokenizer": "a.json", "vocab_size": 300},
            "vocab_size is 300, but tokenizer 'a.json' has its",
        ),
        ("docnn", {"train_path": "x", "format": "csv"}, "must be one of auto, glue, label_text, no_header, text_label"),
        ("masked_lm", {"data": "x", "preset": "basis"}, "did you mean 'base'?"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(task: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        build(task, **values)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_lists_are_read_from_flags() -> None:
    assert build("lm", data="x", pattern="*.rst,*.c").pattern == ("*.rst", "*.c")
    assert build("docnn", train_path="x", kernel_sizes="2,3,4").kernel_sizes == (2, 3, 4)
