"""The commands of a plan, typed by hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from text_cache import with_task_options
from trained import TASK
from waiting import LIMIT_S, until

from trainer.contract.record import RankState, RunDir, decode_events
from trainer.host.ports import free_port

ROOT = Path(__file__).parents[2]


def test_commands_that_are_typed_by_hand_are_a_run_with_a_record_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[train]\ntask = "tiny_task.py:TinyTask"\nmax_updates = 3\nbatch_size = 4\n'
        + "[[cluster.nodes]]\ncpu_ranks = 1\n" * 2
    )
    shutil.copy(ROOT / "tests/support/tiny_task.py", tmp_path)
    environ = os.environ | {"GPUTRAIN_HOME": str(tmp_path / "home")}

    def run_gputrain(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "gputrain_tui", *words]
        return subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)

    def listed() -> dict[str, Any]:
        (entry,) = json.loads(run_gputrain("runs", "--json").stdout)
        return dict(entry)

    lines = run_gputrain("plan", "r.toml", "--shell", "--run-dir", "rec").stdout.splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert (listed()["state"], listed()["recipe"], listed()["world_size"]) == ("starting", "r", 2)
    assert "planned, not started: nobody has run the commands of its nodes" in run_gputrain("runs").stdout
    assert listed()["duration_s"] is None
    assert "planned, not started" in run_gputrain("report", "last").stdout
    refused = run_gputrain("stop", "./rec")
    assert (refused.returncode, "are typed by hand" in refused.stderr) == (2, True)
    nodes = [
        subprocess.Popen(command, shell=True, cwd="/", env=environ, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "finished: max_updates 3 reached\n" in outputs[0], "rank 0 shows where training is"
    assert outputs[1] == ""
    assert (listed()["state"], listed()["exit_code"], listed()["step"]) == ("finished", 0, 3)
    assert "finished: max_updates 3 reached" in run_gputrain("logs", listed()["id"]).stdout
    for name in ("plan.json", "recipe.toml", "status.json"):
        (tmp_path / "rec" / name).unlink()
    assert "finished: max_updates 3 reached" in run_gputrain("logs", "./rec").stdout, "as of a command without any plan"


@pytest.mark.parametrize("ranks", [1, 2], ids=["in this process", "node agent"])
def test_a_node_that_waits_for_rank_0_ends_when_the_record_says_that_node_0_has_failed(
    tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "r.toml").write_text(
        f'[train]\ntask = "{TASK}"\nmax_updates = 3\nbatch_size = 4\njoin_timeout = 1000\n'
        + "".join(f"[[cluster.nodes]]\ncpu_ranks = {count}\n" for count in (2, ranks))
    )
    environ = os.environ | {"GPUTRAIN_HOME": str(with_task_options(tmp_path / "home"))}
    plan = [sys.executable, "-m", "gputrain_tui", "plan", "r.toml", "--shell", "--run-dir", "rec"]
    shell = subprocess.run(plan, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_S).stdout
    first, second = shell.splitlines()[1::2]
    first = re.sub(r"tcp://127.0.0.1:\d+", f"tcp://127.0.0.1:{free_port()}", first)  # the other waits for nobody
    nodes = [
        subprocess.Popen(command, shell=True, cwd="/", env=environ, stderr=subprocess.PIPE, text=True)
        for command in (first, second)
    ]
    run = RunDir(tmp_path / "rec")
    killed, _ = [until(lambda rank=rank: joining_pid(run, rank)) for rank in (0, 2)]
    os.kill(killed, signal.SIGKILL)
    printed = [node.communicate(timeout=LIMIT_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert re.search(r"trainer: rank 2 on \S+: node 0 on \S+ has failed: the process was ended by SIGKILL", printed[1])


def joining_pid(run: RunDir, rank: int) -> int | None:
    """The process of a rank that waits for the others, None before it does."""
    events = decode_events(run.rank_events(rank).read_bytes()) if run.rank_events(rank).exists() else []
    states = [event for event in events if isinstance(event, RankState)]
    return states[-1].pid if states and states[-1].state == "joining" else None
