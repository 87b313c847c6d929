"""Every command of the README runs, in the order of the README, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "mytask.py").write_text(blocks("python")[0])
    return tmp_path


def test_the_two_commands_come_first_and_are_complete() -> None:
    run, tests = blocks("sh")[:2]
    for command in (run, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "gputrain run recipes/demo.toml" in run
    assert "pytest" in tests


def test_the_example_of_a_task_is_under_thirty_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) < 30


def await_file(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} does not appear"


def test_every_command_runs(shell: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPUTRAIN_HOME": str(shell / "home"),
    }
    for block in blocks("sh")[2:]:
        if "gputrain stop" in block:
            await_file(shell / "home", "runs/*/checkpoints/step_00000010.pt")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=shell, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
