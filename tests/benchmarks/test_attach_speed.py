"""Time of `gputrain attach` to show the whole history of a long run, compared with a short run."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic_run
from pty_harness import Terminal

from gputrain_tui.history.replay import replay
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.live_run import LiveRun

pytestmark = pytest.mark.benchmark

GPUTRAIN = Path(sys.executable).parent / "gputrain"
RANKS = 64
STEPS = 100_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run of three gigabytes, deleted afterwards."""
    folder = tmp_path_factory.mktemp("attach")
    yield synthetic_run.whole(folder / "runs", ranks=RANKS, steps=STEPS)
    shutil.rmtree(folder)


def time_to_last_step_s(run: Run, steps: int) -> float:
    """Return the seconds until the last step is shown in the header and under the chart of the whole run."""
    env = {**os.environ, "GPUTRAIN_HOME": str(run.dir.path.parent.parent)}
    with Terminal([GPUTRAIN, "attach", run.id], env=env, columns=190, rows=52) as terminal:
        both = re.compile(rf"{steps:,}.*step {steps:,}".replace(",", ",?", 1), re.DOTALL)
        took = terminal.wait_for(both) - terminal.started
        assert terminal.leave() == 0
    return took


def test_a_history_of_100000_steps_of_64_ranks_is_shown_in_twice_the_time_of_a_hundredth_of_it(run: Run) -> None:
    short = synthetic_run.whole(run.dir.path.parent, ranks=RANKS, steps=STEPS // 100)
    long_s, short_s = [], []
    for _ in range(5):
        short_s.append(time_to_last_step_s(short, STEPS // 100))
        long_s.append(time_to_last_step_s(run, STEPS))
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, capture_output=True)
    torch_s = time.perf_counter() - begin
    print(
        f"\nshown after {statistics.median(long_s):.2f} s (best {min(long_s):.2f}; {STEPS // 100:,} steps: "
        f"{statistics.median(short_s):.2f}, best {min(short_s):.2f}; importing torch: {torch_s:.2f} s); "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    assert min(long_s) <= 2 * min(short_s)


def test_it_is_the_whole_history_and_not_a_part_of_it(run: Run) -> None:
    begin = time.process_time()
    live = LiveRun(run)
    while live.poll():
        pass
    cpu_s = time.process_time() - begin
    known = replay(run.dir)
    assert known is not None
    print(f"\n{cpu_s:.2f} s of processor time for {len(known.events):,} blocks and notes, and the last steps")
    assert live.status == "finished"
    assert live.state.step == live.series.last_step == STEPS
    assert all(view.totals.steps == STEPS for view in live.state.ranks.values())
    assert len(live.state.validations) == STEPS // synthetic_run.BLOCK
    window = live.series.window("loss", 180)
    assert window.first_step <= 256
    assert window.last_step == STEPS
    assert all(low < median < high for low, median, high in zip(window.low, window.middle, window.high, strict=True))
    assert window.middle[0] > 9
    assert window.middle[-1] < 1.6
