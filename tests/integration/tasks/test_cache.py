"""Prepared text is made once, whatever races for it, and is mapped from then on."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from trainer.contract.errors import RequestError
from trainer.contract.task_options import LmOptions
from trainer.tasks import cache
from trainer.tasks.lm import LanguageModel


def race(barrier: Barrier, folder: str, out: str) -> None:
    os.environ["GPUTRAIN_CACHE"] = folder

    def build(scratch: Path) -> None:
        with Path(out).open("a") as file:
            file.write(f"{os.getpid()}\n")
        for part in ("one.bin", "two.bin"):
            time.sleep(0.05)  # long enough that the other would meet half an entry if it could
            (scratch / part).write_bytes(bytes(range(100)))

    barrier.wait()
    entry = cache.entry("test", ["same"], build)
    assert cache.mapped(entry / "two.bin", torch.uint8).tolist() == list(range(100))


def test_processes_that_race_for_an_entry_make_it_once(tmp_path: Path, own_cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    out = tmp_path / "builders"
    racers = [context.Process(target=race, args=(barrier, str(own_cache), str(out))) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(out.read_text().splitlines()) == 1
    assert [path.suffix for path in own_cache.iterdir()] == [""]  # no lock, nothing half made


def test_a_failed_build_leaves_nothing_and_is_made_again(own_cache: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / "part.bin").write_bytes(b"x")
        raise RequestError("the text is not there")

    with pytest.raises(RequestError, match="the text is not there"):
        cache.entry("test", 1, fail)
    assert list(own_cache.iterdir()) == []
    entry = cache.entry("test", 1, lambda scratch: (scratch / "part.bin").touch())
    assert (entry / "part.bin").exists()


def test_a_cache_that_cannot_be_written_is_one_line_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"cannot be written: .*; GPUTRAIN_CACHE names another folder"):
        cache.entry("test", 1, lambda scratch: None)


def test_changed_text_or_options_are_prepared_anew(tmp_path: Path, own_cache: Path) -> None:
    text = tmp_path / "text.txt"

    def windows(**options: float) -> int:
        task = LanguageModel(LmOptions(data=str(text), context=9, **options))
        return len(task.datasets()["train"])

    text.write_bytes(b"x" * 1000)
    assert windows(valid_fraction=0.5) == 55
    assert windows(valid_fraction=0.5) == 55
    assert len(list(own_cache.iterdir())) == 1
    assert windows(valid_fraction=0.1) == 99
    text.write_bytes(b"y" * 2000)
    assert windows(valid_fraction=0.5) == 111
    assert len(list(own_cache.iterdir())) == 3


def test_an_empty_file_maps_to_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(cache.mapped(tmp_path / "empty", torch.int32)) == 0
