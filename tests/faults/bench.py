"""A folder with a small recipe and runs of its own, for tests that start and end real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_cache import with_task_options
from waiting import LIMIT_S, until

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run, list_runs
from trainer.contract.record import RankState, TrainingPlan, decode_events

SUPPORT = Path(__file__).parents[1] / "support"
GATED = SUPPORT / "gated_task.py"

TEXT = "the quick brown fox jumps over the lazy dog. " * 200

RECIPE = """\
name = "tiny"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
task = "{task}"
batch_size = 4
max_updates = {updates}
threads = 1

[task]
data = "{data}"
context = 16
dim = 8
layers = 1
heads = 1
"""

FOR_EVER = 1_000_000


@dataclass
class Bench:
    """A folder with text, recipes and runs of its own."""

    folder: Path

    def recipe(self, updates: int = 5) -> Path:
        data = self.folder / "text.txt"
        data.write_text(TEXT)
        path = self.folder / f"tiny-{updates}.toml"
        endless = updates == FOR_EVER  # it would take all cores from the tests beside, while this one waits
        text = RECIPE.format(ranks=2, task=f"{GATED}:GatedTask" if endless else "lm", updates=updates, data=data)
        path.write_text(f"{text}pause_s = 0.03\nupdates = {FOR_EVER}\n" if endless else text)
        return path

    def torch_free_recipe(self, steps: int | None = None) -> Path:
        """A recipe of ranks that train nothing, for a test of what is around a training; it may have no end."""
        path = self.folder / "free.toml"
        args = "" if steps is None else f'args = ["{steps}"]\n'
        script = f'[train]\nscript = "{SUPPORT / "torch_free_rank.py"}"\n{args}'
        path.write_text(f'name = "free"\n[[cluster.nodes]]\ncpu_ranks = 2\n{script}')
        return path

    @property
    def gate(self) -> Path:
        """The file for which a gated training waits; beside the folder, whose disk may be full."""
        return self.folder.with_name(f"{self.folder.name}.gate")

    def gated_recipe(self, at: int, updates: int) -> Path:
        """A recipe whose training goes on after an update only once there is the gate's file."""
        path = self.recipe(updates)
        text = path.read_text().replace('task = "lm"', f'task = "{GATED}:GatedTask"')
        path.write_text(f'{text}gate = "{self.gate}"\nupdates = {at}\n')
        return path

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        home = with_task_options(self.folder / "home")
        environment = {**os.environ, "GPUTRAIN_HOME": str(home), "NO_COLOR": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "gputrain_tui", *map(str, words)],
            env=environment,
            cwd=self.folder,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def call(self, *words: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
        out, err = process.communicate(stdin, timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def runs(self) -> list[Run]:
        return list_runs(self.folder / "home" / "runs")

    def train_detached(self, recipe: Path) -> Run:
        """Start a detached run, and return it once both ranks have done a step."""
        done = self.call("run", recipe, "--detach")
        assert done.returncode == 0, done.stderr
        return self.await_training()

    def await_training(self) -> Run:
        """The newest run, once both ranks have done a step."""
        until(self.runs)
        run = self.runs()[0]
        until(lambda: all(last_step(run.dir, rank) is not None for rank in (0, 1)))
        return run


def rank_pid(run: Run, rank: int) -> int:
    for event in decode_events(run.dir.node_events(0).read_bytes()):
        if isinstance(event, RankState) and (event.rank, event.state) == (rank, "spawned") and event.pid is not None:
            return event.pid
    raise AssertionError(f"rank {rank} was not spawned")


def first_updates(run: Run) -> list[int]:
    """The update from which each attempt of a run has gone on."""
    events = decode_events(run.dir.rank_events(0).read_bytes())
    return [event.first_update for event in events if isinstance(event, TrainingPlan)]


def node_agent_pid(run: Run) -> int:
    attempt = json.loads(run.dir.attempt.read_bytes())
    return int(attempt["processes"]["0"]["pid"])


def supervisor_pid(run: Run) -> int:
    return int(json.loads(run.dir.status.read_bytes())["supervisor"]["pid"])
