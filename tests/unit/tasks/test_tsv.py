"""Tab-separated sentences: columns by order, name and number, two line ends, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings, strategies as st

from trainer.contract.errors import RequestError
from trainer.contract.task_files import LABEL_NAMES, TEXT_NAMES
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
    rows = read_tsv(str(path), format).rows
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
        ("", "2", "0"),
    ],
    ids=["names", "case", "name and number", "usual names", "one name", "numbers", "no header"],
)
def test_columns_are_found_by_name_or_number_and_a_header_is_no_row(
    tmp_path: Path, header: str, text_column: str | None, label_column: str | None
) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(header + "1\t7\ta fine film\n0\t8\tnot so fine\n")
    rows = read_tsv(str(path), "auto", text_column=text_column, label_column=label_column).rows
    assert [(row.text, row.label) for row in rows] == [("a fine film", "1"), ("not so fine", "0")]


def test_of_two_columns_the_one_that_is_not_named_is_the_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("phrases\tstars\n" + PLAIN)
    assert [row.label for row in read_tsv(str(path), "auto", text_column="phrases").rows] == ["1", "0"]


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
    assert [row.label for row in read_tsv(str(path), "auto").rows] == ["good", "good", "bad"]


def test_quotes_and_unusual_spaces_are_ordinary_characters(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('a "quoted\u0085 film\t1\n', encoding="utf-8")
    assert read_tsv(str(path), "auto").rows[0].text == 'a "quoted\u0085 film'


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


CELLS = st.sampled_from(["0", "1", "2", "text", "label", "sentence", "class", "a fine film", "7", "x"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.integers(2, 4).flatmap(lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1)),
    places=st.permutations(range(4)),
    format=st.sampled_from(["no_header", "auto"]),
)
def test_a_number_is_the_number_of_a_column_whatever_the_first_row_holds(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], places: list[int], format: Format
) -> None:
    text, label = [place for place in places if place < len(rows[0])][:2]
    if format == "auto":  # a first row that names both columns as a header does is one
        assume(not (rows[0][text] in TEXT_NAMES and rows[0][label] in LABEL_NAMES))
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    table = read_tsv(str(path), format, text_column=str(text), label_column=str(label))
    assert [(row.text, row.label, row.line) for row in table.rows] == [
        (row[text], row[label], number) for number, row in enumerate(rows, start=1)
    ]
    assert str(table.columns) == (
        f"no header, the text is column {text} and the label column {label} of {len(rows[0])}"
    )


@pytest.mark.parametrize(
    ("content", "text", "label", "rows"),
    [
        ("a fine film\t0\nso so\t1\n", "0", "1", [("a fine film", "0"), ("so so", "1")]),
        ("a fine film\t1\nso so\t0\n", "0", "1", [("a fine film", "1"), ("so so", "0")]),
        ("1\ta fine film\t1\n2\tso so\t0\n", "1", "2", [("a fine film", "1"), ("so so", "0")]),
        ("2\t1\t0\n5\tb\ta\n", "0", "2", [("2", "0"), ("5", "a")]),
    ],
    ids=["first label 0", "first label 1", "row numbers", "digits alone"],
)
def test_columns_by_number_keep_the_first_row(
    tmp_path: Path, content: str, text: str, label: str, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(content)
    for format in ("auto", "no_header"):
        table = read_tsv(str(path), format, text_column=text, label_column=label)  # type: ignore[arg-type]
        assert [(row.text, row.label) for row in table.rows] == rows


def test_a_column_that_is_found_by_the_usual_name_of_a_header_makes_the_line_a_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("phrase of a film\tid\tlabel\n" + "a fine film\t7\t1\n")
    table = read_tsv(str(path), "auto", text_column="0")
    assert [(row.text, row.label) for row in table.rows] == [("a fine film", "1")]
    assert str(table.columns) == "line 1 is a header, the text is column 0 and the label column 2 of 3"


@pytest.mark.parametrize(
    ("text_column", "message"),
    [("1", "line 1: text_column and label_column are both column 1"), ("2", "text_column is 2, but there are columns")],
)
def test_wrong_numbers_without_a_header_name_the_line(tmp_path: Path, text_column: str, message: str) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(PLAIN)
    with pytest.raises(RequestError) as refused:
        read_tsv(str(path), "no_header", text_column=text_column)
    assert message in str(refused.value)
