from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run

from gputrain_tui.history.run_folders import find
from gputrain_tui.history.status_file import is_over
from trainer.host.process_identity import identify

# --- who still lives -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_running_run_whose_supervisor_was_killed_is_lost(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    supervisor = identify(sleeper.pid)
    assert make_run(tmp_path, status="running", supervisor=supervisor).state == "running"
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert find("last", tmp_path).state == "lost", "a zombie is as dead as one that was waited for"
    sleeper.wait()
    assert find("last", tmp_path).state == "lost"


def test_a_run_whose_supervisor_is_dead_is_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    run = make_run(tmp_path, status="running", supervisor=identify(sleeper.pid)).dir
    assert not is_over(run)
    sleeper.kill()
    sleeper.wait()
    assert is_over(run)
