"""One word for one thing in all that a user reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.console.widgets.findings import finding_entries
from gputrain_tui.console.widgets.run_header import failure_summary
from gputrain_tui.diagnosis.advice import ADVICE, CAUSE_NAMES
from gputrain_tui.headless.closing_report import failure_block
from gputrain_tui.recipe.build import build
from gputrain_tui.state import RunState
from trainer.contract.errors import RequestError
from trainer.contract.flag_help import render
from trainer.contract.record import Failure, Finding
from trainer.contract.schema import describe
from trainer.contract.task_options import LmOptions
from trainer.engine.non_finite import REMEDIES

ROOT = Path(__file__).resolve().parents[2]
UPDATE = re.compile(r"(?<![-_.'\w])updates?(?![-_=(\w]|\.\w)", re.IGNORECASE)
"""The word as a noun, not in a flag, a key or a name."""


def shown_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the text literals of a module that are not documentation, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


@pytest.mark.parametrize("package", ["trainer", "gputrain_tui"])
def test_an_optimizer_step_is_called_a_step(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in shown_texts(path)
        if " " in text and UPDATE.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", ["README.md", "recipes", "gputrain_tui/help"])
def test_an_optimizer_step_is_called_a_step_in_what_is_documented(path: str) -> None:
    files = [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / path).glob("*.*"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if UPDATE.search(line)] == []


# Texts that new users have misread


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [
        ("signal", "the process was ended by SIGKILL: sent by hand, by a scheduler", "killed (SIGKILL)"),
        ("signal", "node 1 was killed by signal 40 before rank 3 finished", "killed (signal 40)"),
        ("signal", "the run's supervisor was killed, and its ranks with it", "killed"),
        ("exit", "the process ended with exit code 3", "exited"),
        ("out_of_memory", "CUDA out of memory", "out of memory"),
    ],
)
def test_a_failure_is_named_in_words_in_the_header_and_the_closing_report(kind: str, message: str, words: str) -> None:
    failure = Failure(time=1.0, kind=kind, message=message, rank=1)
    assert failure_summary(failure) == f"rank 1 {words}"
    assert failure_block(failure, [], "")[0][0][0] == f"rank 1 failed: {words}"


@pytest.mark.parametrize(
    ("step", "in_step", "when"),
    [(49, 50, " in step 50"), (49, None, " after step 49"), (0, 1, " in step 1"), (0, None, " before step 1")],
)
def test_a_failure_is_in_the_step_that_was_being_made_or_after_the_last_that_was_done(
    step: int, in_step: int | None, when: str
) -> None:
    failure = Failure(time=1.0, kind="exception", message="m", rank=1, step=step, in_step=in_step)
    assert failure_summary(failure) == f"rank 1 exception{when}"
    assert failure_block(failure, [], "")[0][0][0] == f"rank 1 failed{when}: exception"


def test_the_help_of_a_flag_that_turns_off_says_so() -> None:
    entries = re.split(r"\n  (?=-)", render("lm", describe(LmOptions), 100))
    turns_off = [" ".join(entry.split()) for entry in entries if entry.startswith("--no-")]
    assert len(turns_off) > 5
    for entry in turns_off:
        assert re.match(r"--no-[\w-]+ turn off, as it is on by default: \w", entry), entry
        assert "unless this is given" not in entry


def test_the_help_of_a_flag_names_a_default_that_there_is() -> None:
    class Options(msgspec.Struct):
        weights: list[float] = []
        name: str = ""
        sizes: tuple[int, ...] = (1, 2)

    text = render("own", describe(Options), 100)
    own = text[text.index("Options of task own:") :].partition("\n\n")[0]
    assert re.findall("default:.*", own) == ["default: 1,2"]


@pytest.mark.parametrize(
    ("text", "setting", "message"),
    [
        ("", "name=nan", "--set name is nan, but name is text: write --set 'name=\"nan\"'"),
        ("", "name=7", "--set name is 7, but name is text: write --set 'name=\"7\"'"),
        ("name = true", "", 'r.toml:1: name is true, but name is text: write name = "true"'),
        ("", "task.prompt=7", "--set task.prompt is 7, but must be text: write --set 'task.prompt=\"7\"'"),
        (
            "",
            "task.pattern=7",
            "--set task.pattern is 7, but must be a list of texts: write --set 'task.pattern=[\"7\"]'",
        ),
        (
            '[cluster]\nspare = ["a", 7]',
            "",
            'r.toml:2: cluster.spare is [\'a\', 7], but must be a list of texts: write ["a","7"] with its quotes',
        ),
    ],
)
def test_a_number_in_place_of_a_text_is_refused_with_the_quotes_to_write(text: str, setting: str, message: str) -> None:
    recipe = f'{text}\n[train]\ntask = "lm"\n[task]\ndata = "stdlib"\n'
    with pytest.raises(RequestError) as refused:
        build(recipe, name="r.toml", overrides=[setting] if setting else [])
    assert str(refused.value) == message
    if setting:
        build(recipe, name="r.toml", overrides=[setting.replace("=", '="') + '"'])


def test_no_finding_ends_with_the_name_of_a_key() -> None:
    state = RunState(world_size=1)
    for cause in (*CAUSE_NAMES, "unattributed"):
        message = "rank 0 is 20.0 ms late in each step (40 % of a step), because of it"
        finding = Finding(time=1.0, rank=0, kind="straggler", message=message, cause=cause)
        state.apply(finding)
        assert [entry.message for entry in finding_entries(state)] == [message]


def test_a_number_that_is_not_finite_is_put_down_to_the_learning_rate_first() -> None:
    for place, advice in REMEDIES.items():
        assert "learning rate" in advice, place
        assert advice.index("learning rate") < len(advice) / 2, place
    assert ADVICE["non_finite"].startswith("a learning rate that is too high is the usual cause")
