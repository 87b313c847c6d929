"""A folder of checkpoints belongs to one training at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_trainer import context
from trained import TrainingResult, train, train_spawned

from trainer.checkpoint import CheckpointWriter, folder_lock
from trainer.checkpoint.folder_lock import LOCK, FolderLock
from trainer.contract.errors import RequestError


def _hold(connection: Connection, folder: str, run_id: str) -> None:
    lock = FolderLock(Path(folder), run_id=run_id)
    connection.send("held")
    assert connection.recv() == "fork"
    child = os.fork()
    if child == 0:
        connection.close()
        signal.pause()
    connection.send(child)
    assert connection.recv() == "release"
    lock.release()


class HolderProcess:
    """Another process, which holds a folder."""

    def __init__(self, folder: Path, run_id: str = "") -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_hold, args=(theirs, str(folder), run_id))
        self.process.start()
        theirs.close()
        assert self.connection.recv() == "held"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def test_a_folder_that_another_process_holds_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    other = HolderProcess(tmp_path, "20261121-mnist")
    try:
        for run_id in ("", "20261121-other"):
            with pytest.raises(RequestError) as raised:
                FolderLock(tmp_path, run_id=run_id)
            assert str(raised.value) == (
                f"{tmp_path}: another training writes its checkpoints here (run 20261121-mnist, process {other.pid} "
                f"on {socket.gethostname()}): end it first, or choose another folder"
            )
    finally:
        other.end()
    FolderLock(tmp_path).release()


def test_the_kernel_releases_the_folder_of_a_killed_process(tmp_path: Path) -> None:
    other = HolderProcess(tmp_path)
    other.end()
    FolderLock(tmp_path).release()


def test_a_run_that_starts_again_waits_for_its_own_process_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = HolderProcess(tmp_path, "same")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        other.end()

    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))
    FolderLock(tmp_path, run_id="same").release()
    assert len(waits) == 1


def test_a_run_does_not_wait_for_ever_for_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = HolderProcess(tmp_path, "same")
    monkeypatch.setattr(folder_lock, "RELEASE_S", 0.1)
    try:
        with pytest.raises(RequestError, match="run same, process"):
            FolderLock(tmp_path, run_id="same")
    finally:
        other.end()


def test_releasing_holds_for_processes_that_were_forked_meanwhile(tmp_path: Path) -> None:
    other = HolderProcess(tmp_path)
    other.connection.send("fork")
    child = other.connection.recv()
    try:
        with pytest.raises(RequestError):
            FolderLock(tmp_path)
        other.connection.send("release")
        other.process.join()
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        other.end()


def test_a_file_system_without_locks_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    writer = CheckpointWriter(tmp_path, keep_last=1)
    writer.save({"step": 1}, step=1)
    writer.close()
    assert (tmp_path / "step_00000001.pt").exists()
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}: cannot be locked (No locks available); another training could write here unnoticed"
    ]


def test_a_file_that_another_training_is_writing_is_kept(tmp_path: Path) -> None:
    other = HolderProcess(tmp_path)
    writing = tmp_path / ".step_00000001.pt.tmp"
    writing.write_bytes(b"half")
    try:
        with pytest.raises(RequestError, match=str(other.pid)):
            CheckpointWriter(tmp_path, keep_last=1)
        assert writing.read_bytes() == b"half"
    finally:
        other.end()
    CheckpointWriter(tmp_path, keep_last=1).close()
    assert not writing.exists()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(train, id="one rank"),
        pytest.param(partial(train_spawned, ranks=2), id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_two_trainings_into_one_folder_are_refused_with_exit_code_2(
    tmp_path: Path, train: Callable[..., TrainingResult]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    other = HolderProcess(kept, "20261121-mnist")
    flags = ("--batch-size", 10, "--save-dir", kept)
    try:
        done = train(tmp_path / "refused", *flags, "--max-updates", 2)
        assert done.code == 2, done.output
        (line,) = [line for line in done.output.splitlines() if "ranks on this node" not in line]
        assert f"run 20261121-mnist, process {other.pid}" in line
    finally:
        other.end()
    assert train(tmp_path / "first", *flags, "--max-updates", 2).code == 0
    assert train(tmp_path / "second", *flags, "--max-updates", 4, "--resume", kept).code == 0
