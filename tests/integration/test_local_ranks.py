"""Where a launcher starts each rank by itself, the one with local rank 0 samples the machine for all of them."""

from __future__ import annotations

import os
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from forked_trainer import ForkedTrainer
from trained import TASK

from trainer.agent.local_ranks import LocalRanks
from trainer.contract.record import NodeSample, RankState, RunDir, decode_events, encode_event
from trainer.host.ports import free_port

SCRIPT = "import time\nend = time.monotonic() + 3.2\nwhile time.monotonic() < end: pass\n"


def record_spawned(run_dir: RunDir, rank: int, pid: int, *, at: float, host: str = "here") -> None:
    run_dir.events.mkdir(exist_ok=True)
    event = RankState(time=at, rank=rank, state="spawned", host=host, pid=pid, device="cpu")
    with run_dir.node_events(0).open("ab") as file:
        file.write(encode_event(event))


def test_ranks_are_found_once_they_are_recorded(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    neighbours = LocalRanks(run_dir, 0, "here", 2)
    assert neighbours.read() == {}
    record_spawned(run_dir, 0, os.getpid(), at=time.time())
    record_spawned(run_dir, 1, os.getpid(), at=time.time(), host="another machine of the same number")
    assert neighbours.read() == {0: os.getpid()}
    record_spawned(run_dir, 1, os.getppid(), at=time.time())
    assert neighbours.read() == {0: os.getpid(), 1: os.getppid()}
    assert neighbours.complete


def test_pids_recorded_by_an_earlier_start_are_not_taken_for_current_processes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    record_spawned(run_dir, 0, ended.pid, at=time.time())
    record_spawned(run_dir, 1, os.getpid(), at=1000.0)  # before this process was there
    assert LocalRanks(run_dir, 0, "here", 2).read() == {}


@pytest.mark.timing
@pytest.mark.parametrize(
    ("ranks", "script"),
    [
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_one_process_of_a_node_samples_all_its_ranks_at_most_once_a_second(
    tmp_path: Path, ranks: int, script: bool
) -> None:
    what = ["--script", str(tmp_path / "own.py")]
    if script:
        (tmp_path / "own.py").write_text(SCRIPT)
    else:
        what = ["--task", TASK, "--threads", "1", "--batch-size", "10", "--stop-time", "0.04"]
    processes = []
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    for rank in map(str, range(ranks)):
        launcher = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(ranks), **address}
        words = ["--cpu", "--run-dir", str(tmp_path / "run"), *what]
        processes.append(ForkedTrainer(words, environ={**os.environ, **(launcher if ranks > 1 else {})}))
    for process in processes:
        done = process.finish()
        assert done.returncode == 0, done.stderr
    events = [e for file in RunDir(tmp_path / "run").events.iterdir() for e in decode_events(file.read_bytes())]
    samples = sorted((event for event in events if isinstance(event, NodeSample)), key=lambda sample: sample.time)
    assert samples
    assert all(later.time - sample.time >= 0.9 for sample, later in pairwise(samples))
    pids = {event.rank: event.pid for event in events if isinstance(event, RankState) and event.state == "spawned"}
    assert len(set(pids.values())) == ranks
    assert sorted(rank.rank for rank in samples[-1].ranks) == list(range(ranks))
    assert all(rank.rss_bytes for rank in samples[-1].ranks)
    assert any(rank.cpu_percent for sample in samples for rank in sample.ranks)
