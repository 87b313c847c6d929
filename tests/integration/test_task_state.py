"""A task's state (words, labels, tokenizer) is in its checkpoints: other data changes no meaning of the weights."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from task_data import TEXT
from trained import TrainingResult, train

from trainer.checkpoint import load
from trainer.engine.task_state import difference

WORDS = {"0": ["dull", "flat", "poor"], "1": ["bright", "fine", "grand"]}
STATED = f"{Path(__file__).parents[1] / 'support' / 'odd_tasks.py'}:StatedTask"


def rows(count: int, *, seed: int) -> list[str]:
    """Return sentences whose label is that of most of their words."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        label = drawn.choice("01")
        words = [drawn.choice(WORDS[label]) for _ in range(3)] + [f"w{drawn.randrange(40)}" for _ in range(4)]
        drawn.shuffle(words)
        made.append(f"{' '.join(words)}\t{label}")
    return made


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def docnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training whose train.tsv has been shuffled since."""
    folder = tmp_path_factory.mktemp("docnn")
    lines = write(folder / "train.tsv", rows(160, seed=1)).read_text().splitlines()
    write(folder / "dev.tsv", rows(60, seed=2))
    done = classify(folder, "first", "--max-epochs", 4)
    assert done.code == 0, done.output
    random.Random(3).shuffle(lines)
    write(folder / "train.tsv", lines)
    return folder


def classify(folder: Path, name: str, *flags: object, data: str = "train.tsv", held_out: str = "dev.tsv") -> Any:
    files = ("--train-path", folder / data, "--eval-path", folder / held_out)
    return train(folder / name, "--task", "docnn", *files, "--batch-size", 16, "--embedding-dim", 16, *flags)


def last_validation(done: TrainingResult) -> tuple[float, float]:
    found = done.events_of("validation")[-1]
    return found["loss"], found["metrics"]["accuracy"]


def messages(done: TrainingResult, kind: str) -> list[str]:
    return [event["message"] for event in done.events_of("finding") if event["kind"] == kind]


def trained_on(folder: Path) -> tuple[float, float]:
    events = [json.loads(line) for line in (folder / "first" / "events" / "0.ndjson").read_text().splitlines()]
    found = [event for event in events if event["type"] == "validation"][-1]
    return found["loss"], found["metrics"]["accuracy"]


def test_shuffled_training_data_does_not_change_an_evaluation(docnn: Path) -> None:
    newest = docnn / "first" / "checkpoints" / "step_00000040.pt"
    done = classify(docnn, "evaluation", "--eval-only", newest, "--eval-split", "valid")
    assert done.code == 0, done.output
    assert last_validation(done) == trained_on(docnn)
    assert trained_on(docnn)[1] > 0.7  # of two classes; how much depends on the version of torch
    assert messages(done, "data_changed") == []


def test_a_resumed_and_a_fine_tuned_training_use_the_words_of_the_checkpoint(docnn: Path) -> None:
    saved = docnn / "first" / "checkpoints" / "step_00000040.pt"
    for flag in ("--resume", "--finetune-from"):
        done = classify(docnn, flag.strip("-"), flag, saved, "--max-updates", 41, "--lr", 1e-9)
        assert done.code == 0, done.output
        assert last_validation(done) == pytest.approx(trained_on(docnn), abs=1e-4)
        newest = max((docnn / flag.strip("-") / "checkpoints").glob("step_*.pt"))
        assert load(newest)["task_state"] == load(saved)["task_state"]


def test_exported_weights_carry_the_words_to_a_fine_tuning(docnn: Path) -> None:
    exported = docnn / "model.safetensors"
    saved = docnn / "first" / "checkpoints" / "step_00000040.pt"
    words = [sys.executable, "-m", "trainer.export_weights", str(saved), str(exported)]
    assert subprocess.run(words, capture_output=True).returncode == 0
    with safe_open(exported, framework="pt") as file:
        assert json.loads(file.metadata()["task_state"]) == load(saved)["task_state"]
    done = classify(docnn, "from exported", "--finetune-from", exported, "--max-updates", 1, "--lr", 1e-9)
    assert done.code == 0, done.output
    assert last_validation(done) == pytest.approx(trained_on(docnn), abs=1e-4)
    assert messages(done, "task_state") == []


def test_an_evaluation_says_how_its_split_differs_from_that_of_the_training(docnn: Path) -> None:
    saved = docnn / "first" / "checkpoints" / "step_00000040.pt"
    lines = (docnn / "dev.tsv").read_text().splitlines()
    write(docnn / "shorter.tsv", lines[:-1])
    write(docnn / "turned.tsv", [f"{line[:-1]}{1 - int(line[-1])}" for line in lines])
    for name, how in (
        ("shorter.tsv", "it has 59 samples now, but had 60"),
        ("turned.tsv", r"(\d+) of \1 samples that were compared have changed, such as sample "),
    ):
        done = classify(docnn, f"on {name}", "--eval-only", saved, "--eval-split", "valid", held_out=name)
        assert done.code == 0, done.output
        (found,) = messages(done, "data_changed")
        told = re.escape(f"the valid split differs from that of the training of {saved}: ")
        assert re.match(told + how, found), found


def test_labels_that_the_checkpoint_lacks_are_refused_unless_the_output_layer_is_left_out(docnn: Path) -> None:
    saved = docnn / "first" / "checkpoints" / "step_00000040.pt"
    write(docnn / "three.tsv", [*rows(40, seed=5), "so so\t2"])
    state = "in the task's state labels[2] is '2' here, and absent there, where the weights were trained"
    for flags in (["--resume", saved], ["--finetune-from", saved], ["--eval-only", saved, "--eval-split", "valid"]):
        done = classify(docnn, "refused", *flags, "--max-epochs", 9, data="three.tsv")
        assert done.code == 2, done.output
        assert f"{saved} does not fit this run's data: {state}" in done.output
        assert "Traceback" not in done.output
    done = classify(
        docnn, "partial", "--finetune-from", saved, "--finetune-partial", "--max-updates", 1, data="three.tsv"
    )
    assert done.code == 0, done.output
    assert "not loaded: different shape: output.weight is [2, 200] instead of [3, 200]" in done.output
    assert messages(done, "task_state") == [state.replace(" the weights", " they")]


def test_more_text_does_not_change_the_tokens_of_a_masked_language_model(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "held_out.txt").write_text(TEXT[:3000])
    flags = ("--task", "masked_lm", "--valid-data", tmp_path / "held_out.txt", "--vocab-size", 128)
    flags += ("--sequence-length", 32, "--batch-size", 8, "--data", tmp_path / "text.txt")
    first = train(tmp_path / "first", *flags, "--max-updates", 8)
    assert first.code == 0, first.output
    (tmp_path / "text.txt").write_text("zebras quiz jovial foxes by Vermont's quay\n" * 200 + TEXT)
    saved = tmp_path / "first" / "checkpoints" / "step_00000008.pt"
    again = train(tmp_path / "again", *flags, "--eval-only", saved, "--eval-split", "valid")
    assert again.code == 0, again.output
    assert last_validation(again) == last_validation(first)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    other = train(
        tmp_path / "other", *flags, "--eval-only", saved, "--eval-split", "valid", "--vocab", tmp_path / "vocab.txt"
    )
    assert other.code == 2, other.output
    assert "is not the vocabulary that the weights were trained with; leave vocab out to use theirs" in other.output


def test_a_users_task_with_a_state_that_it_cannot_restore_is_compared(tmp_path: Path) -> None:
    flags = ("--task", STATED, "--batch-size", 10, "--names", "a,b,c")
    assert train(tmp_path / "first", *flags, "--max-updates", 2, ranks=2).code == 0
    saved = tmp_path / "first" / "checkpoints" / "step_00000002.pt"
    assert load(saved)["task_state"] == {"names": ["a", "b", "c"]}
    other = (*flags, "--names", "b,a,c", "--max-updates", 4)
    for flag in ("--resume", "--finetune-from"):
        done = train(tmp_path / "refused", *other, flag, saved)
        assert done.code == 2, done.output
        assert "in the task's state names[0] is 'b' here, and 'a' there" in done.output
    assert train(tmp_path / "resumed", *other, "--restores", "--resume", saved).code == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("a set", "StatedTask.state_dict(): state['names'] is a builtins.set: a checkpoint holds dense tensors"),
        ("a list", "StatedTask.state_dict() returned a list; it must return a dict"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start(tmp_path: Path, state: str, message: str) -> None:
    done = train(tmp_path / "run", "--task", STATED, "--odd", state, "--max-updates", 2)
    assert done.code == 2, done.output
    assert message in done.output


def test_ranks_whose_task_has_different_states_are_refused(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--task", STATED, "--odd", "by rank", "--max-updates", 2, ranks=2)
    assert done.code == 2, done.output
    assert "state of the task" in done.output


@pytest.mark.parametrize(
    ("saved", "own", "text"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, ""),
        ({"a": float("nan")}, {"a": float("nan")}, ""),
        ({"a": {"x": 1}}, {"a": {"x": 2}}, "a.x is 2 here, and 1 there"),
        ({"a": [1]}, {"a": [1, "z"]}, "a[1] is 'z' here, and absent there"),
        ({"a": 1}, {}, "a is absent here, and 1 there"),
        ({"a": 1}, {"a": True}, "a is True here, and 1 there"),
        ({"a": "x" * 50}, {"a": "y" * 60}, "a is a text of 60 characters here, and a text of 50 characters there"),
    ],
)
def test_the_first_difference_of_two_states_is_named(
    saved: Mapping[str, Any], own: Mapping[str, Any], text: str
) -> None:
    assert difference(saved, own) == text
