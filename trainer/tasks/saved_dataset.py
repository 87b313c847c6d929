"""Folders that Hugging Face's package ``datasets`` saved (``save_to_disk``): their rows, and their text as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.contract.errors import RequestError
from trainer.contract.task_files import SavedDataset
from trainer.tasks import cache
from trainer.tasks.tsv import LabelledSentence, Table


def read_saved_rows(dataset: SavedDataset, *, text_column: str | None, label_column: str | None) -> Table:
    """Read all rows; the labels of a ``ClassLabel`` are its names.

    Raises:
        RequestError: a column is not there, or a row lacks its text or label; names the row, from 1.
    """
    text, label = dataset.columns(text_column, label_column)
    names = dataset.class_names(label)
    rows = []
    for number, row in enumerate(_rows(dataset.folder, [text, label]), start=1):
        value = row[label]
        if names is not None and value is not None:
            value = names[value] if 0 <= value < len(names) else None  # -1 stands for none in test splits
        sentence, given = str(row[text] or "").strip(), "" if value is None else str(value).strip()
        if not sentence or not given:
            raise RequestError(f"{dataset.folder}, row {number}: the {'label' if sentence else 'text'} is empty")
        rows.append(LabelledSentence(sentence, given, number))
    if not rows:
        raise RequestError(f"{dataset.folder} has no row")
    return Table(rows, f"a saved dataset, the text is its column {text} and the label {label}", unit="row")


def saved_text(dataset: SavedDataset, *, text_column: str | None) -> Path:
    """Return a file of the cache with the text of every row, each followed by a line feed."""
    column = dataset.text_column(text_column)

    def build(folder: Path) -> None:
        with (folder / "text.txt").open("w", encoding="utf-8", newline="") as file:
            for number, row in enumerate(_rows(dataset.folder, [column]), start=1):
                if not isinstance(row[column], str):
                    raise RequestError(f"{dataset.folder}, row {number}: the text in column {column} is missing")
                file.write(row[column] + "\n")

    files = sorted(file for file in dataset.folder.iterdir() if file.is_file())
    return cache.entry("datasets1", [cache.fingerprint(files), column], build) / "text.txt"


def _rows(folder: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    datasets = import_module("datasets")
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise RequestError(
            f"{folder} cannot be read by the package datasets: {type(error).__name__}: {text}"
        ) from error
    rows = loaded.select_columns(list(columns)).with_format(None)
    for batch in rows.iter(batch_size=1000):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
