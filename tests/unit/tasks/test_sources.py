"""Which files a task reads, in which order, and what is held out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.contract.errors import RequestError
from trainer.contract.task_files import require_file, text_files
from trainer.tasks.sources import read_pieces, split_tail


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "code.py", "picture.png", ".git/d.txt", "deep/.hidden.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    return folder


@pytest.mark.parametrize(
    ("data", "pattern", "found"),
    [
        ("", ("*.txt",), ["a.txt", "b.txt", "deep/er/c.txt"]),
        ("", ("*.txt", "*.py"), ["a.txt", "b.txt", "code.py", "deep/er/c.txt"]),
        ("a.txt", ("*.py",), ["a.txt"]),
        ("*.txt", (), ["a.txt", "b.txt"]),
        ("**/*.txt", (), ["a.txt", "b.txt", "deep/er/c.txt"]),
    ],
    ids=["folder", "two patterns", "file", "glob", "deep glob"],
)
def test_a_file_a_glob_or_a_folder_names_files_in_one_order(
    corpus: Path, data: str, pattern: tuple[str, ...], found: list[str]
) -> None:
    assert text_files(str(corpus / data), pattern) == [corpus / name for name in found]


def test_stdlib_is_the_source_of_the_running_interpreter() -> None:
    files = text_files("stdlib", ())
    assert files == sorted(files)
    assert Path(os.__file__) in files
    assert all(file.suffix == ".py" for file in files)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a.tx", "a.tx does not exist; did you mean 'a.txt'?"),
        ("no/such/file", "no/such; check the path"),
        ("*.rst", "matches no file"),
        ("deep/er", "has no file that matches *.md; name others with pattern"),
        ("empty.txt", "empty.txt is empty"),
        ("void", "has only empty files"),
    ],
)
def test_text_that_cannot_be_read_is_one_line(corpus: Path, data: str, message: str) -> None:
    (corpus / "empty.txt").touch()
    (corpus / "void").mkdir()
    (corpus / "void" / "one.md").touch()
    with pytest.raises(RequestError) as refused:
        text_files(str(corpus / data), ("*.md",))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission_is_one_line(corpus: Path) -> None:
    (corpus / "a.txt").chmod(0)
    with pytest.raises(RequestError, match=r"a\.txt cannot be read: Permission denied"):
        text_files(str(corpus / "a.txt"), ())
    with pytest.raises(RequestError, match=r"a\.txt cannot be read: Permission denied"):
        text_files(str(corpus), ("*.txt",))


def test_a_folder_in_the_place_of_a_file_is_refused(corpus: Path) -> None:
    with pytest.raises(RequestError, match="is a folder, but must be a file"):
        require_file(str(corpus))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9])
def test_the_held_out_end_and_the_rest_are_the_whole_text(corpus: Path, fraction: float) -> None:
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_bytes(b"".join(b"line %d of " % n + name.encode() + b"\n" for n in range(100)))
    files = [corpus / "a.txt", corpus / "b.txt"]
    train, valid = split_tail(files, fraction)
    kept = b"".join(file.read_bytes() for file in files)
    learned, held_out = (b"".join(p.path.read_bytes()[p.start : p.end] for p in part) for part in (train, valid))
    assert learned + held_out == kept
    assert len(held_out) == pytest.approx(len(kept) * fraction, abs=20)
    assert learned.endswith(b"\n")  # no line is in both


def test_pieces_are_joined_by_a_line_feed_between_files_only(corpus: Path) -> None:
    (corpus / "a.txt").write_text("one")
    (corpus / "b.txt").write_text("two")
    train, valid = split_tail([corpus / "a.txt", corpus / "b.txt"], 0.5)
    assert b"".join(read_pieces(train + valid)) == b"one\ntwo"


def test_a_file_that_shrinks_while_it_is_read_is_refused(corpus: Path) -> None:
    train, _ = split_tail([corpus / "a.txt"], 0.0)
    (corpus / "a.txt").write_text("t")
    with pytest.raises(RequestError, match="became shorter"):
        list(read_pieces(train))
