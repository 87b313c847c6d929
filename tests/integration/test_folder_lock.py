"""A folder of checkpoints belongs to one training at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.checkpoint import CheckpointWriter, folder_lock
from trainer.checkpoint.folder_lock import LOCK, FolderLock
from trainer.contract.errors import RequestError

TASK = f"{(Path(__file__).parents[1] / 'support' / 'tiny_task.py')}:TinyTask"
HOLD = """
import os, signal, sys
from pathlib import Path
from trainer.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), run_id=sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    os.close(1)
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
lock.release()
"""


def hold(folder: Path, run_id: str = "") -> subprocess.Popen[str]:
    """Return another process once it holds the folder; further lines of input have it fork, then release."""
    words = [sys.executable, "-c", HOLD, str(folder), run_id]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def let_go(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def test_a_folder_that_another_process_holds_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    other = hold(tmp_path, "20261121-mnist")
    try:
        for run_id in ("", "20261121-other"):
            with pytest.raises(RequestError) as raised:
                FolderLock(tmp_path, run_id=run_id)
            assert str(raised.value) == (
                f"{tmp_path}: another training writes its checkpoints here (run 20261121-mnist, process {other.pid} "
                f"on {socket.gethostname()}): end it first, or choose another folder"
            )
    finally:
        let_go(other)
    FolderLock(tmp_path).release()


def test_the_kernel_releases_the_folder_of_a_killed_process(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.send_signal(signal.SIGKILL)
    let_go(other)
    FolderLock(tmp_path).release()


def test_a_run_that_starts_again_waits_for_its_own_process_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = hold(tmp_path, "same")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        let_go(other)

    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))
    FolderLock(tmp_path, run_id="same").release()
    assert len(waits) == 1


def test_a_run_does_not_wait_for_ever_for_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hold(tmp_path, "same")
    monkeypatch.setattr(folder_lock, "RELEASE_S", 0.1)
    try:
        with pytest.raises(RequestError, match="run same, process"):
            FolderLock(tmp_path, run_id="same")
    finally:
        let_go(other)


def test_releasing_holds_for_processes_that_were_forked_meanwhile(tmp_path: Path) -> None:
    other = hold(tmp_path)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("fork\n")
    other.stdin.flush()
    child = int(other.stdout.readline())
    try:
        with pytest.raises(RequestError):
            FolderLock(tmp_path)
        other.communicate("release\n", timeout=10)
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        let_go(other)


def test_where_a_file_system_has_no_locks_it_is_said_and_training_goes_on(
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
        f"{tmp_path}: two trainings are not kept apart here, there are no locks (No locks available)"
    ]


def test_what_another_training_is_writing_is_not_cleared_away(tmp_path: Path) -> None:
    other = hold(tmp_path)
    writing = tmp_path / ".step_00000001.pt.tmp"
    writing.write_bytes(b"half")
    try:
        with pytest.raises(RequestError, match=str(other.pid)):
            CheckpointWriter(tmp_path, keep_last=1)
        assert writing.read_bytes() == b"half"
    finally:
        let_go(other)
    CheckpointWriter(tmp_path, keep_last=1).close()
    assert not writing.exists()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_trainings_into_one_folder_are_refused_with_exit_code_2(tmp_path: Path, ranks: int) -> None:
    other = hold(tmp_path, "20261121-mnist")
    words = [sys.executable, "-m", "trainer", "--task", TASK, "--cpu", "--threads", "1", "--batch-size", "10"]
    words += ["--max-updates", "2", "--save-dir", str(tmp_path), "--distributed-world-size", str(ranks)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "ranks on this node" not in line]
        assert f"run 20261121-mnist, process {other.pid}" in line
    finally:
        let_go(other)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words[words.index("--max-updates") + 1] = "4"
    done = subprocess.run([*words, "--resume", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
