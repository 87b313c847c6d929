from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.history import runs
from gputrain_tui.history.runs import create, find, write_status
from trainer.contract.record import RankState, RunDir, Step, encode_event
from trainer.host.process_identity import identify

NOON = 1_795_262_400.0  # 2026-11-21 12:00:00 UTC


def make(root: Path, recipe: str = "demo", *, started: float = NOON, **changes: object) -> runs.Run:
    run = create(
        recipe,
        world_size=2,
        recipe_toml="name = 'demo'\n",
        plan=lambda _: b"{}",
        root=root,
        now=lambda: started,
    )
    if changes:
        write_status(run.dir, msgspec.structs.replace(run.status, **changes))
    return find(run.id, root)


def step(rank: int, number: int, moment: float = NOON) -> Step:
    return Step(time=moment, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=1.5)


def append(run: RunDir, rank: int, *events: Step | RankState, torn: bytes = b"") -> None:
    with run.rank_events(rank).open("ab") as file:
        file.write(b"".join(encode_event(event) for event in events) + torn)


# --- who still lives -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_running_run_whose_supervisor_was_killed_is_lost(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    supervisor = identify(sleeper.pid)
    assert make(tmp_path, status="running", supervisor=supervisor).state == "running"
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert find("last", tmp_path).state == "lost", "a zombie is as dead as one that was waited for"
    sleeper.wait()
    assert find("last", tmp_path).state == "lost"


def test_a_run_whose_supervisor_is_dead_is_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    run = make(tmp_path, status="running", supervisor=identify(sleeper.pid)).dir
    assert not runs.is_over(run)
    sleeper.kill()
    sleeper.wait()
    assert runs.is_over(run)
