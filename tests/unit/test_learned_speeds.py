"""Speeds of devices in the cache: what the next run begins with, and files that are not as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.contract.balanced_shares import ComputeTime
from trainer.contract.learned_speeds import LearnedSpeeds
from trainer.contract.options import Training
from trainer.contract.schema import Option

OPTIONS = [Option(name="layers", kind="int", default=2)]
FAST, SLOW = ComputeTime(0.0, 1.0), ComputeTime(0.0, 3.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_CACHE", str(tmp_path))
    return tmp_path / "speeds"


def speeds(values: dict[str, Any] | None = None, **training: Any) -> LearnedSpeeds:
    return LearnedSpeeds(Training(task="lm", **training), OPTIONS, values or {})


def test_ranks_on_known_devices_begin_with_shares_by_their_speeds() -> None:
    speeds().learn(["A", "B", "A"], [FAST, SLOW, FAST])
    assert speeds().shares(["A", "B"], 64) == [48, 16]
    assert speeds().shares(["B", "A", "A"], 70) == [10, 30, 30]
    assert speeds({"layers": 2}, max_updates=7).shares(["A", "B"], 64) == [48, 16], "a default, and what costs nothing"
    assert speeds().shares(["A", "A"], 64) is None, "equal devices have equal shares"
    assert speeds().shares(["A", "C"], 64) is None, "not known"
    assert speeds().shares([], 64) is None
    assert speeds({"layers": 3}).shares(["A", "B"], 64) is None
    assert speeds(precision="bf16").shares(["A", "B"], 64) is None


def test_tasks_of_equal_name_in_two_folders_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        given = LearnedSpeeds(Training(task="mine.py:Mine"), [], {})
        found.append(given.shares(["A", "B"], 64))
        given.learn(["A", "B"], [FAST, SLOW])
        by_path = LearnedSpeeds(Training(task=f"{tmp_path / name}/mine.py:Mine"), [], {})
        assert by_path.shares(["A", "B"], 64) == [48, 16]
    assert found == [None, None]


def test_what_is_learned_later_counts_beside_what_is_known() -> None:
    speeds().learn(["A", "B"], [FAST, FAST])
    speeds().learn(["C", "B"], [FAST, SLOW])
    assert speeds().shares(["A", "B"], 64) == [48, 16]


def test_equal_devices_teach_nothing(folder: Path) -> None:
    speeds().learn(["A", "A"], [FAST, SLOW])
    assert not folder.exists()


@pytest.mark.parametrize(
    "content", [b"", b'{"A":[0,1],"B":', b"[1]", b'{"A":[0,1],"B":[0,0]}', b'{"A":[0,1],"B":3}', b'{"A":[NaN,1]}', None]
)
def test_a_file_that_is_not_as_it_should_be_is_ignored_and_replaced(folder: Path, content: bytes | None) -> None:
    speeds().learn(["A", "B"], [FAST, SLOW])
    (file,) = folder.iterdir()
    if content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content)
    assert speeds().shares(["A", "B"], 64) is None
    speeds().learn(["A", "B"], [FAST, SLOW])
    if content is not None:
        assert speeds().shares(["A", "B"], 64) == [48, 16]


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUTRAIN_CACHE", str(tmp_path / "file"))
    speeds().learn(["A", "B"], [FAST, SLOW])
    assert speeds().shares(["A", "B"], 64) is None


def test_the_cache_is_bounded(folder: Path) -> None:
    for model in range(120):
        speeds().learn(["A", f"B{model}"], [FAST, SLOW])
    assert speeds().shares(["A", "B0"], 64) is None
    assert speeds().shares(["A", "B119"], 64) == [48, 16]
    for layers in range(10, 120):
        speeds({"layers": layers}).learn(["A", "B"], [FAST, SLOW])
    assert len(list(folder.iterdir())) == 100
    assert speeds({"layers": 119}).shares(["A", "B"], 64) == [48, 16]
