from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_dirs import run_dir

from gputrain_tui import cli, paths
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import write_status


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    return run_dir(paths.runs_folder(), "noted")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    return code, *capsys.readouterr()


def test_a_note_and_tags_are_listed_found_and_removed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir(paths.runs_folder(), "other", started=1_790_000_100.0)
    added = call(capsys, "note", run.id, "best so far", "--tag", "baseline", "--tag", "lr-sweep")
    assert added == (0, f"{run.id} [baseline] [lr-sweep] best so far\n", "")
    code, out, _ = call(capsys, "runs", "--filter", "tags:baseline", "--json")
    (found,) = json.loads(out)
    assert (code, found["id"], found["note"], found["tags"]) == (0, run.id, "best so far", ["baseline", "lr-sweep"])
    _, out, _ = call(capsys, "runs", "--filter", "best")
    assert "baseline lr-sweep" in out
    assert "best so far" in out
    removed = call(capsys, "note", run.id, "", "--untag", "baseline")
    assert removed == (0, f"{run.id} [lr-sweep]\n", "")


def test_an_invalid_tag_is_refused_and_nothing_is_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "note", run.id, "a note", "--tag", "two words")
    refusal = "'two words' is not a tag: 1 to 40 letters, digits or . + / - _, without spaces"
    assert (code, err) == (2, f"gputrain: {refusal}\n")
    assert not run.dir.notes.exists()


def test_a_damaged_file_is_named_and_hides_no_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.dir.notes.write_bytes(b"{")
    code, _, err = call(capsys, "note", run.id, "new")
    assert code == 2
    assert "notes.json is damaged" in err
    assert run.dir.notes.read_bytes() == b"{"
    _, out, _ = call(capsys, "runs", "--json")
    (found,) = json.loads(out)
    assert (found["note"], found["tags"]) == (None, [])


def test_an_archive_has_the_note_and_takes_no_other(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call(capsys, "note", run.id, "kept", "--tag", "base")
    archive = str(tmp_path / "run.tar.gz")
    assert call(capsys, "export", run.id, "--to", "archive", "-o", archive)[0] == 0
    assert call(capsys, "note", archive) == (0, f"{run.id} [base] kept\n", "")
    code, out, err = call(capsys, "note", archive, "changed")
    assert (code, out) == (2, "")
    assert "is an archive, which is read-only" in err


def test_a_filter_that_matches_nothing_is_no_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "runs", "--filter", "state:failed") == (0, "", "none of 1 runs matches 'state:failed'\n")
    run.status.metrics = {"accuracy": 0.5}
    write_status(run.dir, run.status)
    message = "none of 1 runs matches 'metric:acuracy>0'; none has the metric 'acuracy'; did you mean 'accuracy'?\n"
    assert call(capsys, "runs", "--filter", "metric:acuracy>0") == (0, "", message)
    code, out, err = call(capsys, "runs", "--sort", "metric:acuracy")
    assert (code, err) == (
        0,
        "gputrain: --sort metric:acuracy: none of 1 runs has the metric; did you mean 'accuracy'?\n",
    )
    assert run.id in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--filter", "stat:failed"), "filter 'stat:failed': no column 'stat'; did you mean"),
        (("--sort", "los"), "no column 'los' to sort by; did you mean 'loss'"),
        (("--sort", "accuracy"), "no column 'accuracy' to sort by; did you mean 'metric:accuracy'?"),
        (("--filter", "accuracy>0.9"), "filter 'accuracy>0.9': no column 'accuracy'; did you mean 'metric:accuracy'?"),
    ],
)
def test_an_unknown_column_is_refused_in_one_line(
    words: tuple[str, str], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.status.metrics = {"accuracy": 0.5}
    write_status(run.dir, run.status)
    code, out, err = call(capsys, "runs", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
