"""Every command of the README and of the help runs, in the order of the page, in a folder of its own.

A command that stands on several pages runs on the first of them, unless the page goes on with what it has started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, blocks
from waiting import LIMIT_S, until

from gputrain_tui.history.run_folders import list_runs


def commands() -> dict[str, list[str]]:
    """Return the new commands of each page; the first two blocks of the README are run by .ci/run."""
    seen: set[str] = set()
    found = {}
    for name in DOCUMENTS:
        of_page = []
        for block in blocks(name, "sh")[2 if name == "README" else 0 :]:
            lines = block.splitlines()
            of_page += lines if all(line.startswith(("gputrain ", "python ")) for line in lines) else [block]
        new = [command for command in of_page if command not in seen]
        goes_on = any("--resume" in command for command in new)
        found[name] = of_page if goes_on else new
        seen.update(of_page)
    return found


COMMANDS = commands()


@pytest.fixture(scope="module")
def first_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run of the demo."""
    folder = make_folder(tmp_path_factory.mktemp("first"))
    home = folder / "home"
    shell(folder, home)("gputrain run recipes/demo.toml --set train.max_updates=20")
    return home


@pytest.fixture
def home(first_home: Path, tmp_path: Path) -> Path:
    """A copy of it, so that on every page `last` is that run until the page begins one."""
    return Path(shutil.copytree(first_home, tmp_path / "home"))


def make_folder(folder: Path) -> Path:
    """Fill a folder with what commands name. The demo has a smaller model: .ci/run trains that of the README."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    demo = folder / "recipes" / "demo.toml"
    text = demo.read_text()
    smaller = text.replace("\ndim = 128\nlayers = 3\n", "\ndim = 8\nlayers = 1\n")
    assert smaller != text
    demo.write_text(smaller)
    (folder / "mytask.py").write_text(blocks("tasks", "python")[0])
    return folder


def shell(folder: Path, home: Path) -> Callable[[str], str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPUTRAIN_HOME": str(home),
        "GPUTRAIN_CACHE": str(home / "cache"),  # each page has the tokens of the first run, as a user has
    }

    def run(command: str) -> str:
        argv = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("page", [name for name, found in COMMANDS.items() if found])
def test_every_command_of_a_page_runs(page: str, home: Path, tmp_path: Path) -> None:
    run = shell(make_folder(tmp_path), home)

    def await_checkpoint() -> None:
        """Wait until the run that was detached has saved, which it does every ten steps."""
        until(lambda: any(list_runs(home / "runs")[0].dir.checkpoints.glob("step_*0.pt")))

    for command in COMMANDS[page]:
        printed = run(command)
        if "--filter" in command:
            assert "baseline" in printed.splitlines()[-1], "the filter finds the run that was tagged"
        if "--detach" in command:
            await_checkpoint()
        if "--resume" in command:
            run("gputrain stop last")
    assert {run.state for run in list_runs(home / "runs")} <= {"finished", "stopped"}
