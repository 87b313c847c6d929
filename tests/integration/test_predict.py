"""``python -m trainer.predict_inputs``, and exported weights that are used without this package."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks

from trainer import export_weights, predict_inputs
from trainer.checkpoint import write_file
from trainer.contract.task_options import DocNNOptions, MnistOptions
from trainer.tasks.docnn import DocNNTask
from trainer.tasks.lm import LanguageModel
from trainer.tasks.mnist import MnistTask

STATE = {"words": "\n".join(["a", "good", "bad", "film"]), "labels": ["no", "yes"]}
DOCNN = ["--task=docnn", "--train-path=none.tsv", "--dropout=0.5"]


@pytest.fixture(scope="module")
def docnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    task = DocNNTask(DocNNOptions(train_path="none.tsv"))
    task.load_state_dict(STATE)
    path = tmp_path_factory.mktemp("docnn") / "best.pt"
    state = {"task": "docnn", "updates": 3, "model": task.model().state_dict(), "task_state": STATE}
    write_file(path, state, run="some-run")
    return path


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Set standard input."""

    def type_in(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return type_in


def predicted(capfdbinary: pytest.CaptureFixture[bytes], *words: object) -> tuple[int, list[Any], str]:
    code = predict_inputs.main([str(word) for word in words])
    printed = capfdbinary.readouterr()
    return code, [json.loads(line) for line in printed.out.splitlines()], printed.err.decode()


def test_lines_and_objects_give_equal_predictions_and_those_of_the_exported_weights(
    docnn: Path, typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    texts = ["A good film", "bad bad unknown", "film"]
    typed("\n".join(texts).encode("utf-8-sig"))  # as programs on Windows write a file
    code, by_line, said = predicted(capfdbinary, docnn, "--", *DOCNN)
    assert (code, said) == (0, "")
    objects = tmp_path / "rows.jsonl"
    lines = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)
    objects.write_text(lines, encoding="utf-8-sig")
    _, by_object, _ = predicted(capfdbinary, docnn, "--input", objects, "--batch", 2, "--", *DOCNN)
    assert [each["label"] for each in by_object] == [each["label"] for each in by_line]
    exported = tmp_path / "model.safetensors"
    assert export_weights.main([str(docnn), str(exported)]) == 0
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks("exports", "python")[0], names)
    for text, one, other in zip(texts, by_line, by_object, strict=True):
        label, probability = names["classify"](text)
        assert one["label"] == label
        for each in (one, other):  # neither the other sentences of a batch nor the padding count
            assert each["probabilities"][label] == pytest.approx(probability, rel=1e-5)
            assert sum(each["probabilities"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("typed_in", "words", "lines", "text"),
    [
        (b"{\"text\": \"a\"}\n{\"txt\": 1}\n", [], 1,
         "standard input, line 2: there is no column 'text'; its columns are 'txt'"),
        (b"{\"text\": \"a\"}\n\n", [], 1, "standard input, line 2: is empty, where the first line is a JSON object"),
        (b"good\n\xff\n", [], 1, "standard input, line 2: is no UTF-8"),
        (b"sentence\tlabel\ngood\t1\n", [], 0, "standard input, line 1: the text has a tab"),
        (b"{\"text\": \"a\"}\nplain\n", [], 1, "standard input, line 2: is no JSON object like the first line"),
        (b"text,label\r\ngood,1\n", [], 0, "standard input, line 1: is the header of a table: give the column of"),
        (b'"label","text"\n1,"good"\n', [], 0, "standard input, line 1: is the header of a table"),
        (b"", ["--input=none"], 0, "--input none: does not exist"),
        (b"", ["--run=other"], 0, "it is a checkpoint of some-run, not of other"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_one_line(
    docnn: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes], typed_in: bytes, words: list[str], lines: int,
    text: str,
) -> None:  # fmt: skip
    typed(typed_in)
    code, printed, said = predicted(capfdbinary, docnn, "--note=predicting with a.pt", *words, "--", *DOCNN)
    assert (code, len(printed)) == (2, lines)
    *before, refusal = said.splitlines()
    assert text in refusal
    assert before == ["trainer: predicting with a.pt"] * bool(lines)


def test_a_full_disk_behind_the_predictions_is_one_line(
    docnn: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    typed(b"a good film\n")
    kept = os.dup(1)
    try:
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), 1)
        code = predict_inputs.main([str(docnn), "--", *DOCNN])
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    told = capfdbinary.readouterr().err
    assert (code, told) == (1, b"trainer: cannot write standard output: No space left on device\n")


@pytest.mark.parametrize("name", ["reviews.CSV", "reviews.tsv"])
def test_a_table_is_refused_by_the_name_of_its_file(
    docnn: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    (tmp_path / name).write_text("review,stars\ngood film,5\n")
    code, printed, said = predicted(capfdbinary, docnn, "--input", tmp_path / name, "--", *DOCNN)
    assert (code, printed) == (2, [])
    assert f"{name}: is a table, whose other columns would count as text: give the column of texts alone" in said


def test_a_table_like_that_of_the_validation_is_read_and_its_labels_are_no_words(
    docnn: Path, typed: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    typed(b"a good film\nbad\n")
    _, of_lines, _ = predicted(capfdbinary, docnn, "--", *DOCNN)
    (tmp_path / "dev.tsv").write_text("label\tsentence\n1\ta good film\n0\tbad\n")
    code, of_table, said = predicted(capfdbinary, docnn, "--input", tmp_path / "dev.tsv", "--", *DOCNN)
    assert (code, of_table, said) == (0, of_lines, "")


def test_a_text_with_commas_is_no_header(docnn: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    typed(b"a good, text\ntext\nfilm,good\n")
    code, printed, said = predicted(capfdbinary, docnn, "--", *DOCNN)
    assert (code, len(printed), said) == (0, 3, "")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--task=lm", "--data=none"], "is a checkpoint of task docnn, not of lm"),
        ([*DOCNN, "--kernel-num=7"], "does not fit this model"),
        (["--task=tiny_task:TinyTask"], "has no predict(model, rows)"),
        (
            [*DOCNN, "--kernel-nun=3"],
            "--kernel-nun is not an option of the trainer or of task docnn; did you mean '--ker",
        ),
        ([], "--task is missing"),
    ],
)
def test_another_training_than_the_checkpoints_is_refused(
    docnn: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes], flags: list[str], text: str
) -> None:
    typed(b"good\n")
    code, printed, said = predicted(capfdbinary, docnn, "--", *flags)
    assert (code, printed) == (2, [])
    assert text in said


def test_digits_are_read_from_an_idx_file_and_from_json(
    typed: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    torch.manual_seed(0)
    path = tmp_path / "best.pt"
    weights = MnistTask(MnistOptions(data="none")).model().state_dict()
    write_file(path, {"task": "mnist", "model": weights, "task_state": {}})
    images = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8)
    idx = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = bytes(images.flatten().tolist())
    idx.write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 3, 28, 28) + content))
    task = ("--", "--task=mnist", "--data=none")
    code, of_file, said = predicted(capfdbinary, path, "--input", idx, "--batch", 2, *task)
    assert (code, said, len(of_file)) == (0, "", 3)
    rows = [json.dumps({"pixels": image.flatten().tolist()}) for image in images]
    typed("\n".join(rows).encode())
    _, of_lines, _ = predicted(capfdbinary, path, *task)
    assert [each["digit"] for each in of_lines] == [each["digit"] for each in of_file]
    typed(b'{"pixels": [1, 2]}')
    code, _, said = predicted(capfdbinary, path, *task)
    assert code == 2
    assert "standard input, line 1: pixels has 2 numbers, not 28 × 28" in said


def test_a_text_is_continued_alike_each_time(
    typed: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    flags = ["--task=lm", "--data=none", "--dim=16", "--heads=2", "--layers=1", "--sample-bytes=5"]
    torch.manual_seed(0)
    options = LanguageModel.Options(data="none", dim=16, heads=2, layers=1)
    path = tmp_path / "best.pt"
    write_file(path, {"task": "lm", "model": LanguageModel(options).model().state_dict(), "task_state": {}})
    typed(b"one\none\n\n")
    code, printed, _ = predicted(capfdbinary, path, "--", *flags)
    assert code == 0
    assert printed[0] == printed[1]
    assert printed[0]["text"].startswith("one")
    assert len(printed) == 3


OWN = """\
import torch
from trainer.tasks.task import Task


class Own(Task):
    def model(self):
        return torch.nn.Linear(2, 1)

    def predict(self, model, rows):
        numbers = torch.tensor([row["point"] for row in rows])
        return [{"sum": float(each)} for each in numbers.sum(dim=1)]
"""


def test_what_a_task_of_ones_own_prints_is_no_prediction(
    tmp_path: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "loud.py").write_text(
        "print('loading')\n" + OWN.replace("        numbers", "        print(rows)\n        numbers")
    )
    task = f"{tmp_path / 'loud.py'}:Own"
    write_file(tmp_path / "best.pt", {"task": task, "updates": 1, "model": torch.nn.Linear(2, 1).state_dict()}, run="r")
    typed(b'{"point": [1, 2]}\n')
    code, printed, said = predicted(capfdbinary, tmp_path / "best.pt", "--", f"--task={task}")
    assert (code, printed) == (0, [{"sum": 3.0}])
    assert said.startswith("loading\n[")


def test_an_input_on_which_a_task_of_ones_own_fails_is_named_and_those_before_it_are_predicted(
    tmp_path: Path, typed: Any, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    task = f"{tmp_path / 'own.py'}:Own"
    write_file(tmp_path / "best.pt", {"task": task, "updates": 1, "model": torch.nn.Linear(2, 1).state_dict()}, run="r")
    typed(b'{"point": [1, 2]}\n{"point": [1, "x"]}\n{"point": [3, 4]}\n')
    code, printed, said = predicted(capfdbinary, tmp_path / "best.pt", "--", f"--task={task}")
    assert (code, printed) == (2, [{"sum": 3.0}])
    assert "standard input, line 2: Own.predict() fails: " in said
    assert said.endswith("own.py:10 in predict)\n")
    assert said.count("\n") == 1
