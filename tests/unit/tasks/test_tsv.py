"""Tab-separated sentences: three orders of columns, two line ends, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.errors import RequestError
from trainer.tasks.tsv import Format, read_tsv

PLAIN = "a fine film\t1\nnot so fine\t0\n"


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (PLAIN, "auto"),
        (PLAIN, "text_label"),
        (PLAIN.replace("\n", "\r\n"), "auto"),
        (PLAIN.rstrip("\n"), "auto"),
        ("\ufeff" + PLAIN, "auto"),
        ("1\ta fine film\n0\tnot so fine\n", "auto"),
        ("1\ta fine film\n0\tnot so fine\n", "label_text"),
        ("sentence\tlabel\n" + PLAIN, "auto"),
        ("sentence\tlabel\r\n" + PLAIN.replace("\n", "\r\n"), "glue"),
        ("index\tlabel\tsentence\n7\t1\ta fine film\n8\t0\tnot so fine\n", "auto"),
    ],
    ids=[
        "auto",
        "named",
        "crlf",
        "no last line end",
        "mark",
        "label first",
        "named label first",
        "glue",
        "glue crlf",
        "glue order",
    ],
)
def test_all_layouts_give_the_same_rows(tmp_path: Path, content: str, format: Format) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(content.encode())
    rows = read_tsv(str(path), format)
    assert [(row.text, row.label) for row in rows] == [("a fine film", "1"), ("not so fine", "0")]
    first = 2 if "sentence" in content else 1
    assert [row.line for row in rows] == [first, first + 1]


def test_single_words_are_told_from_labels_by_how_often_they_repeat(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("good\tfine\ngood\tgreat\nbad\tpoor\n")
    assert [row.label for row in read_tsv(str(path), "auto")] == ["good", "good", "bad"]


def test_quotes_and_unusual_spaces_are_ordinary_characters(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('a "quoted\u0085 film\t1\n', encoding="utf-8")
    assert read_tsv(str(path), "auto")[0].text == 'a "quoted\u0085 film'


@pytest.mark.parametrize(
    ("content", "format", "message"),
    [
        (b"one\t1\ntwo\nthree\t0\n", "auto", "line 2: 1 tab-separated column, but 2 are expected"),
        (b"one\t1\textra\n", "auto", "line 1: 3 tab-separated columns, but 2"),
        (b"one\t1\n\t0\n", "text_label", "line 2: the text is empty"),
        (b"one\t1\ntwo\t\n", "text_label", "line 2: the label is empty"),
        (b"one\t1\n\ntwo\t0\n", "auto", "line 2: 1 tab-separated column"),
        (b"one\t1\ntw\xffo\t0\n", "auto", "line 2: not UTF-8 text"),
        (b"sentence\tlabel\n", "auto", "has a header, but no row"),
        (b"index\tsentence\n0\tone\n", "auto", "line 1: the header has no column 'label'"),
        (b"one\t1\n", "glue", "line 1: the header has no column 'sentence'"),
        (b"", "auto", "is empty"),
        (b"\n\n", "auto", "is empty"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path: Path, content: bytes, format: Format, message: str) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(content)
    with pytest.raises(RequestError) as refused:
        read_tsv(str(path), format)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
