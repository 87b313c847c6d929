"""A stop keeps the work of a training whose steps are longer than the given grace period."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

from gputrain_tui.history.record_tail import last_step
from trainer.contract.record import RunDir

KEPT = ("--save-dir", "kept", "--run-dir", "record")
SLOW = """
import time
from tiny_task import TinyTask

class Slow(TinyTask):
    def loss(self, model, batch):
        if model.training:
            time.sleep(1.5)
        return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    "how", [["--distributed-world-size", "2"], ["--distributed-no-spawn"]], ids=["node agent", "in process"]
)
def test_a_stop_waits_for_steps_that_are_longer_than_the_grace(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "slow_task.py").write_text(SLOW)
    support = Path(__file__).parents[1] / "support"
    words = ["--task", "slow_task:Slow", "--cpu", "--batch-size", "2", "--max-updates", "200", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words, *how, "--stop-grace", "0.1", *KEPT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(support), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    record = RunDir(tmp_path / "record")
    until(lambda: last_step(record, 0) is not None and last_step(record, 0).step >= 2)
    process.terminate()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    saved = sorted((tmp_path / "kept").glob("step_*.pt"))
    assert saved, output
    assert f"stopped at step {int(saved[-1].stem.removeprefix('step_'))}, saved " in output
