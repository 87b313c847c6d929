"""Nothing that a run directory holds leads to a signal to a process that is not the run's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pid_namespace import run_in_namespace

from gputrain_tui.lifecycle import leftovers
from trainer.host.processes import RUN

PROGRAM = Path(__file__).with_name("any_run_directory.py")


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_no_content_of_a_run_directory_leads_to_a_process_or_a_folder_of_others(tmp_path: Path, count: int) -> None:
    done = run_in_namespace(PROGRAM, str(count), tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_this_process_and_its_ancestors_are_not_ended_as_leftovers(tmp_path: Path) -> None:
    """A rank that ends what is left of its own run, for instance, is not left."""
    end = "from pathlib import Path; from gputrain_tui.lifecycle.leftovers import kill_processes; "
    end += f"print(kill_processes(Path({str(tmp_path)!r})))"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {end!r}]).returncode)"
    environment = {**os.environ, RUN: str(tmp_path)}
    sleeper = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        done = subprocess.run(
            [sys.executable, "-c", parent], env=environment, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
        assert sleeper.wait(10) == -9
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("named", ["/run/../run", "{here}/link"], ids=["dots", "link"])
def test_a_run_is_known_by_whatever_path_leads_to_it(tmp_path: Path, named: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    path = named.format(here=tmp_path) if named.startswith("{") else f"{tmp_path}{named}"
    with subprocess.Popen(["cat"], env={RUN: path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # a process that is about to execute its program has no environment yet
        assert leftovers.processes_of(tmp_path / "run") == [process.pid]
