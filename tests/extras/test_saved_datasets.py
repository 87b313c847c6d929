"""Tasks on folders that the real package ``datasets`` saved, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from text_cache import own_cache as own_cache

from trainer.contract.errors import RequestError
from trainer.contract.task_options import DocNNOptions, LmOptions
from trainer.tasks.docnn import DocNNTask
from trainer.tasks.lm import LanguageModel

datasets = pytest.importorskip("datasets", reason="pip install datasets")

TEXTS = ["a fine film", "dull and\nflat", "bright", "poor ä"] * 30


def save(folder: Path, labels: list[Any], *, names: list[str] | None = None) -> str:
    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    made = datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)
    # Shuffled and in a tensor format, as a preparation may leave it: both are saved.
    made.shuffle(seed=3).with_format("torch").save_to_disk(str(folder), num_shards=2)
    return str(folder)


def test_sentences_and_the_names_of_their_classes_are_read(tmp_path: Path) -> None:
    train = save(tmp_path / "train", [1, 0, 1, 0] * 30, names=["no", "yes"])
    valid = save(tmp_path / "valid", [0, 1] * 10)
    task = DocNNTask(DocNNOptions(train_path=train))
    data = task.datasets()["train"]
    assert len(data) == 120
    assert task.state_dict()["labels"] == ["no", "yes"]
    words = set(task.state_dict()["words"].split("\n"))
    assert words == {"a", "fine", "film", "dull", "and", "flat", "bright", "poor", "ä"}
    assert sum(label for _, label in (data[index] for index in range(120))) == 60
    assert "a saved dataset, the text is its column text and the label label" in task.data_note()
    with pytest.raises(RequestError, match=r"valid, row 1: label '[01]' does not occur in the training file"):
        DocNNTask(DocNNOptions(train_path=train, eval_path=valid)).datasets()


def test_the_text_of_a_dataset_is_learnt_row_by_row(tmp_path: Path) -> None:
    folder = save(tmp_path / "train", [0] * 120)
    task = LanguageModel(LmOptions(data=folder, context=16, valid_fraction=0.0))
    data = task.datasets()["train"]
    text = bytes(torch.cat([data[index][:-1] for index in range(len(data))]).tolist()).decode()
    rows = datasets.load_from_disk(folder)["text"]
    assert "".join(f"{row}\n" for row in rows).startswith(text[:-1])
    assert len(text) > 1000


@pytest.mark.parametrize("labels", [[0, -1], [0, None]])
def test_a_row_without_a_label_is_one_line(tmp_path: Path, labels: list[Any]) -> None:
    folder = save(tmp_path / "train", labels, names=["no", "yes"])
    with pytest.raises(RequestError, match=r"train, row [12]: the label is empty"):
        DocNNTask(DocNNOptions(train_path=folder)).datasets()


def test_a_damaged_folder_is_one_line(tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "train", [0, 1], names=["no", "yes"]))
    for file in folder.glob("*.arrow"):
        file.write_bytes(b"nothing")
    with pytest.raises(RequestError, match="train cannot be read by the package datasets: ") as refused:
        DocNNTask(DocNNOptions(train_path=str(folder))).datasets()
    assert "\n" not in str(refused.value)
