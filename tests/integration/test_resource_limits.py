"""More ranks than a machine can ever hold are refused before one of them starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.host.resource_limits import ResourceLimits, read_limits

MEETING = ["--distributed-init-method", "tcp://127.0.0.1:29555"]
ROOMY = ResourceLimits(processes=None, files=None, memory_bytes=None)


@pytest.mark.parametrize(
    ("room", "ranks", "reason"),
    [
        (ROOMY, 10**6, ""),
        (ResourceLimits(processes=1000, files=None, memory_bytes=None), 1000, ""),
        (
            ResourceLimits(processes=1000, files=None, memory_bytes=None),
            1001,
            "at most 1000: 1000 processes are allowed",
        ),
        (ResourceLimits(processes=1000, files=1024, memory_bytes=None), 504, ""),
        (
            ResourceLimits(processes=1000, files=1024, memory_bytes=None),
            505,
            "at most 504: a process may open 1024 files",
        ),
        (
            ResourceLimits(processes=1000, files=1024, memory_bytes=1 << 30),
            52,
            "at most 51: 1.0 GiB of memory, and a rank takes 20 MiB or more",
        ),
        (ResourceLimits(processes=None, files=3, memory_bytes=None), 1, "at most 0: a process may open 3 files"),
    ],
)
def test_the_first_exhausted_resource_is_named(room: ResourceLimits, ranks: int, reason: str) -> None:
    count = "1 rank was" if ranks == 1 else f"{ranks} ranks were"
    expected = f"{count} asked for on this node, which can hold {reason}" if reason else ""
    assert room.refusal(ranks) == expected


def test_limits_of_a_container_count_and_max_is_none(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "sys/kernel").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal:        4096 kB\nMemFree:          1 kB\nSwapTotal:       1024 kB\n")
    (proc / "sys/kernel/pid_max").write_text("77\n")
    (cgroup / "memory.max").write_text("max\n")
    found = read_limits(proc, cgroup)
    assert found.memory_bytes == 5120 << 10
    assert found.processes == 77
    assert found.files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "pids.max").write_text("5\n")
    found = read_limits(proc, cgroup)
    assert (found.memory_bytes, found.processes) == (1000, 5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--distributed-world-size", "100000"],
        ["--distributed-world-size", str(10**12)],
        [*MEETING, "--distributed-gpus", "1000000", "--distributed-world-size", "2000000"],
    ],
)
def test_an_absurd_number_of_ranks_is_one_line_and_exit_code_2(flags: list[str], tmp_path: Path) -> None:
    task = f"{(Path(__file__).parents[1] / 'support' / 'tiny_task.py')}:TinyTask"
    words = [sys.executable, "-m", "trainer", "--task", task, "--cpu", "--run-dir", str(tmp_path / "run"), *flags]
    done = subprocess.run([*words, "--max-updates", "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "ranks were asked for on this node, which can hold at most" in line
    assert not (tmp_path / "run").exists()
