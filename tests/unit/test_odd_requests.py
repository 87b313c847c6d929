"""Files and words that are no recipe, or no file: each is one line, nothing waits, and nothing fills the memory."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from gputrain_tui import cli
from gputrain_tui.hosts.hostfile import read_hostfile
from gputrain_tui.lifecycle.prepared import prepare
from gputrain_tui.preflight import NotReadyError
from gputrain_tui.recipe.build import build, load
from gputrain_tui.recipe.files import recipe_name
from trainer.contract.errors import RequestError

GOOD = '[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "lm"\nmax_updates = 1\n[task]\ndata = "{data}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("x = " + "[" * 300 + "]" * 300, "nested too deeply"),
        ("x = " + "{a = " * 400 + "1" + "}" * 400, "nested too deeply"),
        (".".join(["a"] * 3000) + " = 1", "nested too deeply"),
        ('{"train": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        ('{"train": ' + "[" * 90000 + "]" * 90000 + "}", "nested too deeply"),
        ("[train]\nmax_updates = " + "9" * 5000, "too many digits"),
        ('{"train": {"max_updates": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"train": {"task": "lm", "save_dir": "a\\u0000b"}}', "without NUL characters"),
        ('{"train": {"task": "lm"}, "task": {"data": "\\ud800"}}', "must be UTF-8 text"),
    ],
)
def test_an_odd_recipe_is_refused_in_one_short_line(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        build(text, name="odd.toml")
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 120


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lr=" + "[" * 3000, "--set train.lr: is nested too deeply"),
        ("a" + ".a" * 3000 + "=1", "--set a: is nested too deeply"),
        ("train.max_updates=" + "9" * 5000, "--set train.max_updates: contains a number with too many digits"),
        ("cluster.nodes.².gpus=1", "cluster.nodes has no entry '²'"),
        ("task.data=\udcff", "must be UTF-8 text"),
    ],
)
def test_an_odd_setting_is_refused_in_one_line(setting: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(GOOD.format(data="stdlib"), name="odd.toml", overrides=[setting])


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (lambda: load("/dev/zero"), lambda: read_hostfile(Path("/dev/zero"))):
        with pytest.raises(RequestError, match="/dev/zero is longer than 1 MiB"):
            read()
    with Path("/dev/zero").open(encoding="utf-8") as zero:
        monkeypatch.setattr("sys.stdin", zero)
        with pytest.raises(RequestError, match="stdin is longer than"):
            load("-")


def test_standard_input_is_utf_8_whatever_the_locale_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'name = "é"\n' + GOOD.format(data="stdlib")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))
    assert load("-").name == "é"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="ascii"))
    with pytest.raises(RequestError, match=r"stdin is not UTF-8 text \(byte 0\)"):
        load("-")


def test_a_pipe_is_never_read_for_a_list_of_recipes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert recipe_name(pipe) is None  # it has no writer: opening it would wait for ever


def test_a_recipe_comes_through_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, GOOD.format(data="stdlib").encode())
    os.close(writer)
    assert load(f"/dev/fd/{reader}").train.task == "lm"
    os.close(reader)


def test_a_deep_file_in_the_folder_hides_no_other_recipe(tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("x = " + "[" * 5000 + "]" * 5000)
    assert recipe_name(deep) is None


@pytest.mark.parametrize(
    ("key", "setting"),
    [("task.data", []), ("train.resume", ["train.resume={long}"]), ("train.save_dir", ["train.save_dir={long}"])],
)
def test_a_name_that_no_file_system_takes_is_a_check_that_fails(key: str, setting: list[str]) -> None:
    long = "x" * 5000
    text = GOOD.format(data=long if key == "task.data" else "stdlib")
    recipe = build(text, name="odd.toml", overrides=[each.format(long=long) for each in setting])
    with pytest.raises(NotReadyError) as refused:
        prepare(recipe)
    assert key in refused.value.errors[0].key
    assert "File name too long" in refused.value.errors[0].what


def test_a_script_with_a_name_that_no_file_system_takes_is_a_check_that_fails() -> None:
    text = f'[[cluster.nodes]]\ncpu_ranks = 2\n[train]\nscript = "{"x" * 5000}"\n'
    with pytest.raises(NotReadyError, match="File name too long"):
        prepare(build(text, name="odd.toml"))


def test_quoted_text_has_no_control_characters_and_no_line_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd.toml"
    odd.write_text('"\\u001b[2J\\nx" = 1\n')
    assert cli.main(["plan", str(odd)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "␛[2J␊x is not known" in line
