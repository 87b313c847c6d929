"""Read labelled sentences from tab-separated files of several column orders; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from trainer.contract.errors import RequestError
from trainer.contract.task_files import refuse_unreadable, require_file

Format = Literal["auto", "text_label", "label_text", "glue"]


class LabelledSentence(NamedTuple):
    """Sentence with its label, and its line in the file."""

    text: str
    label: str
    line: int
    """Line in the file, from 1."""


def read_tsv(name: str, format: Format) -> list[LabelledSentence]:
    """Read all rows of a file; quotes are ordinary characters, as in GLUE's files.

    Args:
        name: path of the file.
        format: the column order; ``auto`` detects GLUE's header, else guesses which of two columns is the label.

    Raises:
        RequestError: the file is missing, unreadable, empty or not UTF-8, or a row is malformed; names the line.
    """
    path = require_file(name)
    lines = _lines(path)
    first = 0
    if format == "glue" or (format == "auto" and "sentence" in (lines[0].lower().split("\t"))):
        text_column, label_column, width = _glue_columns(path, lines[0])
        first = 1
    else:
        label_first = format == "label_text" or (format == "auto" and _label_is_first(lines))
        text_column, label_column, width = (1, 0, 2) if label_first else (0, 1, 2)
    rows = [
        _row(path, line, number, text_column, label_column, width)
        for number, line in enumerate(lines[first:], start=first + 1)
    ]
    if not rows:
        raise RequestError(f"{path} has a header, but no row")
    return rows


def _lines(path: Path) -> list[str]:
    with refuse_unreadable(path):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(f"{path}, line {line}: not UTF-8 text") from error
    # Not splitlines(): it also splits at characters that occur inside sentences, such as U+0085.
    lines = [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
    if lines == [""]:
        raise RequestError(f"{path} is empty")
    return lines


def _glue_columns(path: Path, header: str) -> tuple[int, int, int]:
    names = [name.strip().lower() for name in header.split("\t")]
    for needed in ("sentence", "label"):
        if needed not in names:
            raise RequestError(f"{path}, line 1: the header has no column {needed!r}, but {', '.join(names)}")
    return names.index("sentence"), names.index("label"), len(names)


def _label_is_first(lines: list[str]) -> bool:
    """Return whether the first of two columns is the label: it has no spaces, or fewer distinct values."""
    rows = [columns for line in lines[:1000] if len(columns := line.split("\t")) == 2]
    left, right = ({columns[side] for columns in rows} for side in (0, 1))
    left_words, right_words = (any(" " in value for value in side) for side in (left, right))
    if left_words != right_words:
        return right_words
    return len(left) < len(right)


def _row(path: Path, line: str, number: int, text_column: int, label_column: int, width: int) -> LabelledSentence:
    columns = line.split("\t")
    if len(columns) != width:
        found = f"{len(columns)} tab-separated column{'s' if len(columns) != 1 else ''}"
        raise RequestError(f"{path}, line {number}: {found}, but {width} are expected")
    text, label = columns[text_column].strip(), columns[label_column].strip()
    if not text or not label:
        raise RequestError(f"{path}, line {number}: the {'text' if not text else 'label'} is empty")
    return LabelledSentence(text, label, number)
