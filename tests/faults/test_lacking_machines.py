"""Machines that lack what a run needs: one line with the fix, exit code 3, and no traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TASK = """\
[[cluster.nodes]]
cpu_ranks = 2
[train]
task = "lm"
max_updates = 1
num_workers = {workers}
[task]
data = "text.txt"
"""
FULL = "mount -t tmpfs -o size=8k none /dev/shm; head -c 8192 /dev/zero >/dev/shm/full"
NO_PROC = "mount -t tmpfs none /proc"
REFUSE_PRCTL = """\
import ctypes, os, sys
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]
number = {"x86_64": 157, "aarch64": 167}[os.uname().machine]
# seccomp: load the number of the system call; EPERM if it is prctl, else allow.
filters = (Filter * 4)(
    Filter(0x20, 0, 0, 0), Filter(0x15, 0, 1, number), Filter(0x06, 0, 0, 0x50001), Filter(0x06, 0, 0, 0x7FFF0000)
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, filters)), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def in_namespace(tmp_path: Path) -> list[str]:
    """Words before a command that is run in mounts and processes of its own."""
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs mount namespaces (root, unshare)")
    return words


def call(words: list[str], folder: Path) -> tuple[int, str]:
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(folder), "GPUTRAIN_HOME": str(folder / "home")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def recipe(folder: Path, workers: int) -> Path:
    (folder / "text.txt").write_text("the quick brown fox " * 500)
    file = folder / "demo.toml"
    file.write_text(TASK.format(workers=workers))
    return file


GPUTRAIN = f"exec {sys.executable} -P -m gputrain_tui"
BY_HAND = f"exec {sys.executable} -P -m trainer --task lm --data text.txt --cpu --max-updates 1 --num-workers 2"


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("setup", "what", "fix"),
    [
        (FULL, "/dev/shm is full: 0 B free", "start the container with --shm-size=2g"),
        (NO_PROC, "/proc is not mounted", "mount -t proc proc /proc"),
    ],
    ids=["full /dev/shm", "no /proc"],
)
def test_a_machine_that_lacks_something_is_refused_with_the_fix(
    in_namespace: list[str], tmp_path: Path, setup: str, what: str, fix: str, command: str
) -> None:
    line = f"{setup}; {GPUTRAIN} {command} {recipe(tmp_path, workers=2)}"
    code, output = call([*in_namespace, "sh", "-c", line], tmp_path)
    assert code == 3, output
    assert what in output
    assert fix in output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("home/runs/*"))


def test_refused_prctl_is_named_with_the_fix(tmp_path: Path) -> None:
    line = [sys.executable, "-c", REFUSE_PRCTL, sys.executable, "-P", "-m", "gputrain_tui", "run"]
    code, output = call([*line, str(recipe(tmp_path, workers=0))], tmp_path)
    assert code == 3, output
    assert "prctl() is refused (Operation not permitted)" in output
    assert "allow it in the container's seccomp profile" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("setup", "what"),
    [(FULL, "/dev/shm has 0 KiB free"), (NO_PROC, "/proc is not mounted")],
    ids=["full /dev/shm", "no /proc"],
)
def test_a_command_by_hand_is_refused_likewise(in_namespace: list[str], tmp_path: Path, setup: str, what: str) -> None:
    recipe(tmp_path, workers=2)
    code, output = call([*in_namespace, "sh", "-c", f"{setup}; {BY_HAND}"], tmp_path)
    assert (code, output.count("\n")) == (3, 1), output
    assert output.startswith(f"trainer: {what}")
