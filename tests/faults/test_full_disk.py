"""A run whose disk fills up and stays full trains to its end, keeps its last checkpoint, and says what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bench import Bench, until

from gputrain_tui.running import leftovers

UPDATES = 2000
KEPT = 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs the superuser")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "others").open("ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def test_a_disk_that_stays_full_costs_the_record_and_not_the_training(small_disk: Path) -> None:
    bench = Bench(small_disk)
    settings = [f"train.save_every_updates={KEPT}", "train.keep_last=1", "train.test=false"]
    words = ["run", bench.recipe(UPDATES), *(word for text in settings for word in ("--set", text))]
    process = bench.start(*words)
    run = bench.training()
    until(lambda: any(run.dir.checkpoints.glob("step_*.pt")))
    ranks = [pid for pid in leftovers.processes_of(run.dir.path) if pid != process.pid]
    for pid in ranks:  # all of them are held while the disk fills, wherever they are
        os.kill(pid, signal.SIGSTOP)
    fill(small_disk)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (ended,) = bench.runs()
    assert (ended.state, ended.status.exit_code) == ("finished", 0)
    assert ended.status.message == "the disk of the run directory is full: the end of the record is missing"
    assert ended.status.message in err
    assert any(run.dir.checkpoints.glob("step_*.pt"))
    assert list(run.dir.path.rglob("*.tmp")) == []
    assert "Traceback" not in err + run.dir.rank_log(0).read_text()
