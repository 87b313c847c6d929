"""The program of help topic ``automation``: it finds a stopped rank with this command line alone, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from bench import FOR_EVER, LIMIT_S, Bench, rank_pid, until
from documents import blocks

PROGRAM = blocks("automation", "python")[0]


def test_the_program_names_the_rank_keeps_its_stacks_stops_and_resumes(bench: Bench) -> None:
    recipe = bench.recipe(FOR_EVER)
    # The stopped rank does not answer to the stop.
    settings = ("--set", "train.save_every_updates=2", "--set", "cluster.on_stall=report")
    settings += ("--set", "train.stop_grace=2")
    assert bench.call("run", recipe, *settings, "--detach").returncode == 0
    run = bench.await_training()
    until(lambda: any(run.dir.checkpoints.glob("step_*.pt")))
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "GPUTRAIN_HOME": str(bench.folder / "home"), "PATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=bench.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, stopped, resumed = done.stdout.splitlines()
    assert told.startswith("running: rank 1: rank 1 on ")
    assert "its process is stopped (state T)" in told
    assert stopped == "stop: 0"
    assert resumed == "resume: 0"
    groups = json.loads((bench.folder / "stacks.json").read_text())["groups"]
    assert any(group["ranks"] == [1] and "stopped" in group["problem"] for group in groups)
    again = until(lambda: next((each for each in bench.runs() if each.id != run.id and each.state == "running"), None))
    assert bench.call("stop", again.id).returncode == 0
