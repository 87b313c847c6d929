"""Reader of labelled sentences in tab-separated files with several column orders; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.task_files import LABEL_NAMES, TEXT_NAMES, refuse_unreadable, require_file

Format = Literal["auto", "text_label", "label_text", "glue", "no_header"]


class LabelledSentence(NamedTuple):
    """Sentence with its label, and its line in the file."""

    text: str
    label: str
    line: int


class Columns(NamedTuple):
    """Columns of text and label in every row."""

    text: int
    label: int
    width: int
    """Number of columns."""
    has_header: bool
    """Whether the first line names the columns."""

    def __str__(self) -> str:
        header = "line 1 is a header" if self.has_header else "no header"
        return f"{header}, the text is column {self.text} and the label column {self.label} of {self.width}"


class Table(NamedTuple):
    """Rows of a file, and how it was read."""

    rows: list[LabelledSentence]
    columns: Columns | str
    """Or how another kind of file was read."""
    unit: Literal["line", "row"] = "line"
    """What the number of a row counts."""


def read_tsv(name: str, format: Format, *, text_column: str | None = None, label_column: str | None = None) -> Table:
    """Read all rows of a file; quotes are ordinary characters, as in GLUE's files.

    Raises:
        RequestError: the file is missing, unreadable, empty or not UTF-8, a column is not there, or a row is
            malformed; names the line.
    """
    path = require_file(name)
    lines = _lines(path)
    names = [name.strip() for name in lines[0].split("\t")]
    if format == "glue" or (format == "auto" and not (text_column or label_column) and "sentence" in _lower(names)):
        text_column, label_column = text_column or "sentence", label_column or "label"
    if format == "no_header":
        columns = _named_columns(path, names, text_column or "0", label_column or "1")._replace(has_header=False)
    elif text_column is not None or label_column is not None:
        columns = _named_columns(path, names, text_column, label_column)
    elif format == "auto" and _has_usual(names, TEXT_NAMES) and _has_usual(names, LABEL_NAMES):
        columns = _named_columns(path, names, None, None)
    else:
        label_first = format == "label_text" or (format == "auto" and _label_is_first(lines))
        columns = Columns(int(label_first), int(not label_first), 2, False)
    first = int(columns.has_header)
    rows = [_row(path, line, number, columns) for number, line in enumerate(lines[first:], start=first + 1)]
    if not rows:
        raise RequestError(f"{path} has a header, but no row")
    return Table(rows, columns)


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


def _lower(names: list[str]) -> list[str]:
    return [name.lower() for name in names]


def _has_usual(names: list[str], usual: tuple[str, ...]) -> bool:
    return not set(usual).isdisjoint(_lower(names))


def _named_columns(path: Path, names: list[str], text: str | None, label: str | None) -> Columns:
    """Return the columns given by name or number; one not given is the one with a usual name, or the other of two."""
    wanted = {"text": (text, TEXT_NAMES), "label": (label, LABEL_NAMES)}
    indices = {kind: _column(path, names, f"{kind}_column", name) for kind, (name, _) in wanted.items() if name}
    by_name = any(name and not name.isdecimal() for name, _ in wanted.values())
    for kind, (name, usual) in wanted.items():
        if name:
            continue
        others = [index for index in range(len(names)) if index not in indices.values()]
        usual_ones = [index for index in others if names[index].lower() in usual]
        by_name |= bool(usual_ones)
        fitting = usual_ones or (others if len(others) == 1 else [])
        if not fitting:
            raise RequestError(
                f"{path}, line 1: the column of the {kind} is unknown: set {kind}_column to one of {_list(names)}"
            )
        indices[kind] = fitting[0]
    if indices["text"] == indices["label"]:
        raise RequestError(f"{path}, line 1: text_column and label_column are both column {indices['text']}")
    has_usual = all(names[indices[kind]].lower() in usual for kind, (_, usual) in wanted.items())
    return Columns(indices["text"], indices["label"], len(names), by_name or has_usual)


def _column(path: Path, names: list[str], option: str, wanted: str) -> int:
    if wanted.isdecimal():
        if len(wanted) <= 9 and int(wanted) < len(names):
            return int(wanted)
        raise RequestError(f"{path}, line 1: {option} is {wanted[:9]}, but there are columns 0 to {len(names) - 1}")
    for known, name in ((names, wanted), (_lower(names), wanted.lower())):
        if name in known:
            return known.index(name)
    guess = nearest(wanted, names)
    raise RequestError(f"{path}, line 1: the header has no column {wanted!r}, but {_list(names)}{guess}")


def _list(names: list[str]) -> str:
    return ", ".join(map(quoted, names[:10])) + (", …" if len(names) > 10 else "")


def _label_is_first(lines: list[str]) -> bool:
    """Return whether the first of two columns is the label: it has no spaces, or fewer distinct values."""
    rows = [columns for line in lines[:1000] if len(columns := line.split("\t")) == 2]
    left, right = ({columns[side] for columns in rows} for side in (0, 1))
    left_words, right_words = (any(" " in value for value in side) for side in (left, right))
    if left_words != right_words:
        return right_words
    return len(left) < len(right)


def _row(path: Path, line: str, number: int, columns: Columns) -> LabelledSentence:
    values = line.split("\t")
    if len(values) != columns.width:
        have = f"{len(values)} tab-separated column{'s' if len(values) != 1 else ''}"
        raise RequestError(f"{path}, line {number}: {have}, but {columns.width} are expected")
    text, label = values[columns.text].strip(), values[columns.label].strip()
    if not text or not label:
        raise RequestError(f"{path}, line {number}: the {'text' if not text else 'label'} is empty")
    return LabelledSentence(text, label, number)
