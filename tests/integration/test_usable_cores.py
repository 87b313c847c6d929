"""How many threads a rank gets, where not all cores of the machine are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.host.cores import share_of_cores

TASK = """
import torch
from tiny_task import TinyTask

class Counting(TinyTask):
    def model(self):
        print("threads:", torch.get_num_threads())
        return super().model()
"""


@pytest.mark.parametrize(
    ("own", "parent", "quota", "local_ranks", "cores"),
    [
        (64, 64, None, 1, 64),
        (64, 64, None, 8, 8),
        (4, 64, None, 4, 4),  # bound each to its own
        (4, 4, None, 4, 1),  # all of them in a container of four cores
        (64, 64, 2.5, 1, 2),
        (64, 64, 16.0, 4, 4),
        (64, 64, 0.5, 1, 1),
        (2, 2, None, 4, 1),
    ],
)
def test_ranks_share_the_cores_that_they_may_use(
    own: int, parent: int, quota: float | None, local_ranks: int, cores: int
) -> None:
    assert share_of_cores(own=own, parent=parent, quota=quota, local_ranks=local_ranks) == cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a mask that is smaller than the machine needs two cores")
def test_a_rank_that_is_bound_to_one_core_computes_with_one_thread(tmp_path: Path) -> None:
    (tmp_path / "counting_task.py").write_text(TASK)
    support = Path(__file__).parents[1] / "support"
    core = min(os.sched_getaffinity(0))
    bind = (
        f"import os, runpy, sys; os.sched_setaffinity(0, {{{core}}}); runpy.run_module('trainer', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", bind, "--task", "counting_task:Counting", "--cpu", "--max-updates", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(support), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "threads: 1\n" in done.stdout
