from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from gputrain_tui.console.stack_request import request_stack
from gputrain_tui.state import RankView
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir

RANK = """
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
def waits_for_a_batch():
    print("ready", flush=True)
    os.close(int(sys.argv[1]))
    signal.pause()
waits_for_a_batch()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.logs.mkdir(parents=True)
    return found


@pytest.fixture
def rank(run_dir: RunDir) -> Iterator[RankView]:
    ready, there = os.pipe()
    with run_dir.rank_log(3).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(there)], stdout=log, stderr=log, pass_fds=[there],
            env={**os.environ, "GPUTRAIN_RUN": str(run_dir.path)},
        )  # fmt: skip
    os.close(there)
    select.select([ready], [], [], 60)  # the other end is closed: it has come to where it waits, or has ended
    os.close(ready)
    view = RankView(3)
    view.pid, view.host = process.pid, socket.gethostname()
    yield view
    process.kill()
    process.wait()


def test_a_stack_request_shows_the_new_part_of_the_log_alone(run_dir: RunDir, rank: RankView) -> None:
    assert b"ready" in run_dir.rank_log(3).read_bytes()
    request = request_stack(run_dir, rank)
    lines: list[str] = until(lambda: (found := request.answer()) and "<module>" in "".join(found) and found)
    assert "(most recent call first)" in lines[0]
    assert any("waits_for_a_batch" in line for line in lines)
    assert "ready" not in lines


def test_a_process_that_is_not_of_the_run_is_never_signalled(run_dir: RunDir) -> None:
    view = RankView(0)
    view.pid, view.host = os.getpid(), "localhost"
    with pytest.raises(RequestError, match="rank 0 is not running any more"):
        request_stack(run_dir, view)


def test_a_stack_request_to_another_machine_is_refused(run_dir: RunDir, rank: RankView) -> None:
    rank.host = "node047"
    with pytest.raises(RequestError, match="rank 3 runs on node047: send SIGQUIT to process"):
        request_stack(run_dir, rank)


def test_a_stack_request_to_a_rank_without_a_process_is_refused(run_dir: RunDir) -> None:
    with pytest.raises(RequestError, match="rank 1 has no process yet"):
        request_stack(run_dir, RankView(1))
