"""Folders of Hugging Face's ``datasets``: their columns and what is refused, without the package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.errors import MachineNotReadyError, RequestError
from trainer.contract.task_files import SavedDataset, saved_dataset
from trainer.contract.task_options import DocNNOptions, LmOptions

STRING = {"dtype": "string", "_type": "Value"}
FEATURES: dict[str, Any] = {
    "id": {"dtype": "int64", "_type": "Value"},
    "sentence": STRING,
    "title": STRING,
    "label": {"names": ["neg", "pos"], "_type": "ClassLabel"},
    "stars": {"dtype": "int64", "_type": "Value"},
}


def save(folder: Path, features: Any = FEATURES) -> Path:
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``datasets`` found: its folder is read for the columns alone."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json" if name == "datasets" else name))


@pytest.mark.parametrize(
    ("text", "label", "columns"),
    [
        (None, None, ("sentence", "label")),
        ("title", "stars", ("title", "stars")),
        ("2", "4", ("title", "stars")),
        (
            "sentense",
            None,
            "there is no column 'sentense', but 'id', 'sentence', 'title', 'label', 'stars'; did you",
        ),
        ("stars", None, "column 'stars' does not hold text"),
        ("9", None, "there is no column '9', but"),
    ],
)
def test_columns_are_given_by_name_or_number_or_found(text: str | None, label: str | None, columns: Any) -> None:
    dataset = SavedDataset(folder=Path("reviews"), features=FEATURES)
    if isinstance(columns, str):
        with pytest.raises(RequestError) as refused:
            dataset.columns(text, label)
        assert str(refused.value).startswith(f"reviews: {columns}")
    else:
        assert dataset.columns(text, label) == columns
    assert dataset.class_names("label") == ["neg", "pos"]
    assert dataset.class_names("stars") is None


@pytest.mark.usefixtures("installed")
def test_what_a_folder_lacks_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path / "reviews")
    DocNNOptions(train_path=str(folder)).check_data()
    LmOptions(data=str(folder)).check_data()
    plain = save(tmp_path / "plain", {"body": STRING, "n": FEATURES["stars"]})
    for options, line in (
        (
            DocNNOptions(train_path=str(plain)),
            "the column of the text is unknown: set text_column to one of 'body', 'n'",
        ),
        (
            DocNNOptions(train_path=str(plain), text_column="body"),
            "the column of the label is unknown: set label_column to one of 'body', 'n'",
        ),
        (LmOptions(data=str(plain), text_column="n"), "column 'n' does not hold text"),
    ):
        with pytest.raises(RequestError) as refused:
            options.check_data()
        assert str(refused.value) == f"{plain}: {line}"


@pytest.mark.usefixtures("installed")
def test_a_folder_of_several_splits_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    save(tmp_path / "all" / "train")
    save(tmp_path / "all" / "test")
    (tmp_path / "all" / "dataset_dict.json").write_text("{}")
    with pytest.raises(
        RequestError, match=r"holds the splits of a dataset: name the folder of one, such as .*/all/test"
    ):
        saved_dataset(str(tmp_path / "all"))
    for number, content in enumerate(("", "[]", '{"features": 3}', "{}")):
        folder = save(tmp_path / f"damaged {number}")
        (folder / "dataset_info.json").write_text(content)
        with pytest.raises(RequestError, match=r"dataset_info\.json does not name the columns of a dataset"):
            saved_dataset(str(folder))


def test_without_the_package_such_a_folder_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "reviews")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    with pytest.raises(MachineNotReadyError, match="reviews needs the package datasets: pip install datasets"):
        DocNNOptions(train_path=str(folder)).check_data()
    assert saved_dataset(str(tmp_path)) is None
    assert saved_dataset(str(tmp_path / "none.tsv")) is None


def test_a_column_of_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b\n")
    with pytest.raises(RequestError, match=r"text_column is 'text', but .*text\.txt is no folder that the package"):
        LmOptions(data=str(tmp_path / "text.txt"), text_column="text").check_data()
