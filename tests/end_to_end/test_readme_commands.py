"""Every command of the README runs, in the order of the README, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

from gputrain_tui.history.runs import list_runs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "mytask.py").write_text(blocks("python")[0])
    return tmp_path


def test_every_command_runs(shell: Path) -> None:
    home = shell / "home"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPUTRAIN_HOME": str(home),
    }

    def run(block: str) -> str:
        words = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(words, cwd=shell, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def await_checkpoint() -> None:
        """Wait until the run that was detached has saved, which it does every ten steps."""
        until(lambda: any(list_runs(home / "runs")[0].dir.checkpoints.glob("step_*0.pt")))

    for block in blocks("sh")[2:]:
        printed = run(block)
        if "--filter" in block:
            assert "baseline" in printed.splitlines()[-1], "the filter finds the run that was tagged"
        if "--detach" in block:
            await_checkpoint()
        if "--resume" in block:
            run("gputrain stop last")
    assert {run.state for run in list_runs(home / "runs")} == {"finished", "stopped"}
