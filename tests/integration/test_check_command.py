"""Preflight checks as a table over facts; and the facts themselves, read on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from commands import Command, command
from recipe_texts import recipe

from gputrain_tui.hosts.environment_facts import installed_torch
from trainer.contract.record import RunDir, ShareChange, encode_event


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.txt").write_text("to be or not to be\n" * 100)
    return tmp_path


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    found = installed_torch()
    program = "import torch; print(torch.__version__, torch.version.cuda)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert f"{found.version} {found.cuda}" == printed.strip()


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(capsys, "check")


def test_check_lists_every_check_and_exits_with_3(folder: Path, check: Command) -> None:
    wanted = recipe()
    (folder / "one.toml").write_text(wanted.origin.text)
    ready = check("one.toml")
    assert (ready.returncode, ready.stderr) == (0, "")
    assert ready.stdout.startswith("one: ready\n✓ task")
    refused = check("one.toml", "--set", "task.data=qqq")
    assert refused.returncode == 3
    lines = refused.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("✗ data"))
    assert lines[at].endswith("qqq does not exist")
    assert lines[at + 1].strip() == "→ set task.data to its path  (--set task.data)"
    report = msgspec.json.decode(check("one.toml", "--json", "--set", "task.data=qqq").stdout)
    assert (report["recipe"], report["ready"]) == ("one", False)
    assert [result["key"] for result in report["results"] if result["status"] == "error"] == ["task.data"]
    assert json.loads(check("one.toml", "--json").stdout)["ready"] is True


def test_a_wrong_recipe_is_2_and_not_3(folder: Path, check: Command) -> None:
    (folder / "one.toml").write_text(recipe(train='task = "lm"').origin.text)
    wrong = check("one.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "one.toml:5: train.max_updates is 0, and nothing would end this training" in wrong.stderr
    assert check("none.toml").returncode == 2


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("finetune_from", "none.pt", "none.pt does not exist"),
        ("finetune_from", "empty", "empty is a folder"),
        ("finetune_from", "torn", "torn has no .metadata: it was not saved to the end"),
        ("eval_only", "none.pt", "none.pt does not exist"),
        ("eval_only", "empty", "empty holds no checkpoint"),
        ("resume", "empty", "empty holds no checkpoint"),
    ],
)
def test_a_file_that_the_run_would_start_from_is_looked_for(
    folder: Path, check: Command, key: str, value: str, what: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "torn").mkdir()
    (folder / "torn" / "__0_0.distcp").touch()  # of torch.distributed.checkpoint
    text = recipe(
        train=f'task = "lm"\nmax_updates = 1\neval_split = "valid"\n{key} = "{value}"', task='data = "stdlib"'
    )
    (folder / "one.toml").write_text(text.origin.text)
    found = msgspec.json.decode(check("one.toml", "--json").stdout)
    assert [(result["key"], result["what"]) for result in found["results"] if result["status"] == "error"] == [
        (f"train.{key}", what)
    ]


@pytest.mark.parametrize(
    ("shares", "what"),
    [
        (None, "old is no run directory: old/events/0.ndjson cannot be read: No such file or directory"),
        ([], "old has no balanced shares in its record"),
        ([3, 5], "the shares of old are 3, 5 samples of 2 ranks, but this run divides 4 among 2"),
        ([1, 1, 2], "the shares of old are 1, 1, 2 samples of 3 ranks, but this run divides 4 among 2"),
        ([1, 3], None),
    ],
)
def test_the_run_whose_shares_are_repeated_is_read_before_the_start(
    folder: Path, check: Command, shares: list[int] | None, what: str | None
) -> None:
    if shares is not None:
        change = encode_event(ShareChange(time=1.0, step=1, previous=[], shares=shares, cause="start"))
        (folder / "old" / "events").mkdir(parents=True)
        RunDir("old").rank_events(0).write_bytes(change if shares else b"")
    train = 'task = "lm"\nmax_updates = 1\nbatch_size = "balanced"\nglobal_batch_size = 4\nshares_from = "old"'
    (folder / "one.toml").write_text(recipe("cpu_ranks = 2", train=train, task='data = "stdlib"').origin.text)
    ended = check("one.toml", "--json")
    assert ended.returncode == (0 if what is None else 3)
    found = [each for each in msgspec.json.decode(ended.stdout)["results"] if each["key"] == "train.shares_from"]
    assert [(each["status"], each["what"]) for each in found] == [
        ("ok", "those of old are repeated") if what is None else ("error", what)
    ]


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_something_else_in_place_of_the_lock_is_refused_before_the_start(
    folder: Path, check: Command, kind: str
) -> None:
    kept = folder / "kept"
    kept.mkdir()
    if kind == "link":
        (kept / ".lock").symlink_to(folder / "thesis.txt")
    else:
        (kept / ".lock").mkdir()
    (folder / "one.toml").write_text(
        recipe(train='task = "lm"\nmax_updates = 1\nsave_dir = "kept"', task='data = "stdlib"').origin.text
    )
    ended = check("one.toml", "--json")
    assert ended.returncode == 3
    found = msgspec.json.decode(ended.stdout)
    assert [(result["key"], result["what"]) for result in found["results"] if result["status"] == "error"] == [
        (
            "train.save_dir",
            "no checkpoint can be written: kept/.lock is a link, a folder or a device, and no lock of a training",
        )
    ]
