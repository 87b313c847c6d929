"""Native frames by py-spy or pystack: as they print them, of a real process, and of a program that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from waiting import until

from trainer.agent import native_stacks
from trainer.agent.native_stacks import COMMANDS, read_native_stacks, threads_of_py_spy, threads_of_pystack
from trainer.host.processes import is_held

BIN = Path(sys.executable).parent
SCRIPT = "import sys, time\nprint(1, flush=True)\ndef wait():\n    time.sleep(600)\nwait()\n"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps in a function of its own."""
    (tmp_path / "waits.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, tmp_path / "waits.py"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def only(folder: Path, name: str, text: str = "") -> None:
    """Make a folder with this program alone: a link to the installed one, or a shell script."""
    folder.mkdir()
    if not text:
        (folder / name).symlink_to(BIN / name)
        return
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("name", COMMANDS)
def test_native_frames_of_a_real_process_which_goes_on(
    name: str, waiting: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed here")
    only(tmp_path / "bin", name)
    monkeypatch.setattr(native_stacks, "FOLDERS", (str(tmp_path / "bin"),))
    found = read_native_stacks(waiting.pid)
    assert found.problem == ""
    frames = found.threads[0].frames
    own = next(index for index, frame in enumerate(frames) if frame.user)
    assert (frames[own].function, frames[own].line) == ("wait", 4)
    assert "sleep" in "".join(frame.function for frame in frames[:own])
    assert not is_held(waiting.pid)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", "neither py-spy nor pystack is installed on this host"),
        ("echo Error: Permission Denied >&2; exit 1", "py-spy: Error: Permission Denied"),
        ("echo [1]", "py-spy printed no stacks"),
        ("kill -STOP $5; exec sleep 600", "py-spy took more than 1 s"),
    ],
)
def test_a_program_that_fails_is_named_and_the_process_goes_on(
    program: str, problem: str, waiting: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    if program:
        only(folder, "py-spy", program)
    monkeypatch.setattr(native_stacks, "FOLDERS", (str(folder),))
    monkeypatch.setattr(native_stacks, "TIMEOUT_S", 1.0)
    assert read_native_stacks(waiting.pid) == ([], problem)
    until(lambda: not is_held(waiting.pid))


def test_a_stopped_process_is_left_alone(
    waiting: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(tmp_path / "bin", "py-spy", "kill -CONT $5")
    monkeypatch.setattr(native_stacks, "FOLDERS", (str(tmp_path / "bin"),))
    os.kill(waiting.pid, signal.SIGSTOP)
    until(lambda: is_held(waiting.pid))
    assert read_native_stacks(waiting.pid) == ([], "the process is stopped")
    assert is_held(waiting.pid)


def test_the_main_thread_of_py_spy_comes_first() -> None:
    def thread(number: int, name: str | None) -> dict[str, object]:
        lines = [("read", "/lib/libc.so.6", 0), ("loop", "/home/me/train.py", 7), ("_run", "/usr/lib/x.py", 3)]
        frames = [{"name": name, "filename": file, "module": None, "line": line} for name, file, line in lines]
        return {"os_thread_id": number, "thread_name": name, "frames": frames}

    found = threads_of_py_spy(msgspec.json.encode([thread(8, None), thread(7, "MainThread")]), 7)
    assert [each.name for each in found] == ["MainThread", "thread 8"]
    frames = [(frame.function, frame.file, frame.line) for frame in found[0].frames]
    assert frames[:2] == [("read", "libc.so.6", 0), ("loop", "/home/me/train.py", 7)]


def test_the_text_of_pystack_is_read_innermost_first() -> None:
    text = """\
Traceback for thread 8 (python) [] (most recent call last):
    (Python) File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
        self._bootstrap_inner()

Traceback for thread 7 (python) [] (most recent call last):
    (Python) File "/home/me/train.py", line 7, in <module>
        loop()
    (C) File "./Modules/timemodule.c", line 2159, in pysleep (inlined) (/usr/lib/libpython3.11.so.1.0)
"""
    main, _ = threads_of_pystack(text.encode(), 7)
    assert [(frame.function, frame.line) for frame in main.frames] == [("pysleep", 2159), ("<module>", 7)]
