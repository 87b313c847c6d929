"""Tab-separated sentences: columns by order, name and number, two line ends, and errors that name the line."""

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


@pytest.mark.parametrize(
    ("header", "text_column", "label_column"),
    [
        ("stars\tid\tphrase of a film\n", "phrase of a film", "stars"),
        ("stars\tid\tPhrase of a film\n", "phrase of a film", "Stars"),
        ("stars\tid\tphrase of a film\n", "2", "stars"),
        ("doc_label\tslots\ttext\n", None, None),
        ("label\tslots\tphrase of a film\n", "phrase of a film", None),
        ("label\tslots\ttext\n", "2", "0"),
        ("2\t1\t0\n", "0", "2"),
        ("", "2", "0"),
    ],
    ids=["names", "case", "name and number", "usual names", "one name", "numbers", "names are digits", "no header"],
)
def test_columns_are_found_by_name_or_number_and_a_header_is_no_row(
    tmp_path: Path, header: str, text_column: str | None, label_column: str | None
) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(header + "1\t7\ta fine film\n0\t8\tnot so fine\n")
    rows = read_tsv(str(path), "auto", text_column=text_column, label_column=label_column)
    assert [(row.text, row.label) for row in rows] == [("a fine film", "1"), ("not so fine", "0")]


def test_of_two_columns_the_one_that_is_not_named_is_the_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("phrases\tstars\n" + PLAIN)
    assert [row.label for row in read_tsv(str(path), "auto", text_column="phrases")] == ["1", "0"]


@pytest.mark.parametrize(
    ("text_column", "label_column", "message"),
    [
        ("phrases", "star", "line 1: the header has no column 'star', but 'id', 'phrases', 'stars'; did you mean 'st"),
        ("3", "stars", "line 1: text_column is 3, but there are columns 0 to 2"),
        ("00000000003", "stars", "line 1: text_column is 000000000, but there are columns 0 to 2"),
        ("phrases", "1", "line 1: text_column and label_column are both column 1"),
        (
            "phrases",
            None,
            "line 1: the column of the label is unknown: set label_column to one of 'id', 'phrases', 'stars'",
        ),
    ],
)
def test_a_missing_column_is_reported_with_the_columns_of_the_file(
    tmp_path: Path, text_column: str, label_column: str | None, message: str
) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("id\tphrases\tstars\n0\ta fine film\t1\n")
    with pytest.raises(RequestError) as refused:
        read_tsv(str(path), "auto", text_column=text_column, label_column=label_column)
    assert message in str(refused.value)


def test_the_label_column_is_the_one_whose_words_repeat(tmp_path: Path) -> None:
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
