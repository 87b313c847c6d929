"""Every command of the README and of the help runs, in the order of the page, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, blocks
from waiting import LIMIT_S, until

from gputrain_tui.history.run_folders import list_runs

COMMANDS = {name: blocks(name, "sh")[2 if name == "README" else 0 :] for name in DOCUMENTS}
"""Blocks of each page; the first two of the README are run by .ci/run."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run, so that `last` is one on every page."""
    folder = make_folder(tmp_path_factory.mktemp("first"))
    home = folder / "home"
    shell(folder, home)("gputrain run recipes/demo.toml --set train.max_updates=20")
    return home


def make_folder(folder: Path) -> Path:
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "mytask.py").write_text(blocks("tasks", "python")[0])
    return folder


def shell(folder: Path, home: Path) -> Callable[[str], str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPUTRAIN_HOME": str(home),
    }

    def run(block: str) -> str:
        argv = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("page", [name for name, found in COMMANDS.items() if found])
def test_every_command_of_a_page_runs(page: str, home: Path, tmp_path: Path) -> None:
    run = shell(make_folder(tmp_path), home)

    def await_checkpoint() -> None:
        """Wait until the run that was detached has saved, which it does every ten steps."""
        until(lambda: any(list_runs(home / "runs")[0].dir.checkpoints.glob("step_*0.pt")))

    for block in COMMANDS[page]:
        printed = run(block)
        if "--filter" in block:
            assert "baseline" in printed.splitlines()[-1], "the filter finds the run that was tagged"
        if "--detach" in block:
            await_checkpoint()
        if "--resume" in block:
            run("gputrain stop last")
    assert {run.state for run in list_runs(home / "runs")} <= {"finished", "stopped"}
