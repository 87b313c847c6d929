"""Memory of a console that follows a run for a week, compared with the first day."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import synthetic_run

from gputrain_tui.history.run_folders import open_run
from gputrain_tui.lifecycle.live_run import LiveRun
from trainer.contract.record import AnyEvent, decode_events

pytestmark = pytest.mark.benchmark

RANKS = 8
DAY = 24 * 3600
"""Steps of a day, at one per second."""
PORTION = 600
"""Steps per poll."""


class Week:
    """Source of the events of a week, some with each poll."""

    backlog_bytes = 0

    def __init__(self, synthetic: synthetic_run.SyntheticRun) -> None:
        self._synthetic = synthetic
        self._done = 0
        self._ranks = range(synthetic.ranks)

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        synthetic, first = self._synthetic, self._done + 1
        self._done += PORTION
        steps = range(first, first + PORTION)
        lines = [synthetic.step(rank, n, synthetic.began + n) for n in steps for rank in self._ranks]
        lines += [synthetic.sample(0, synthetic.began + n) for n in range(first, first + PORTION, 10)]
        return list(decode_events(b"".join(lines)))

    def close(self) -> None:
        """Do nothing."""


def rss_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_week_takes_no_more_memory_than_a_day(tmp_path: Path) -> None:
    synthetic = synthetic_run.SyntheticRun(tmp_path / "runs", ranks=RANKS, rate=1)
    run = open_run(synthetic.dir.path)
    assert run is not None
    time = [0.0]
    live = LiveRun(run, source=Week(synthetic), clock=lambda: time[0])
    held = []
    for _ in range(7):
        for _ in range(DAY // PORTION):
            time[0] += 10
            live.poll()
        held.append(rss_mib())
    days = ", ".join(f"{size:.0f}" for size in held)
    print(f"\nafter each day {days} MiB; {live.state.step:,} steps of {RANKS} ranks")
    assert live.state.step == 7 * DAY
    assert live.series.last_step == 7 * DAY
    assert held[-1] <= held[0] + 12, "a level more of every curve, and nothing that grows with the steps"
    assert held[-1] <= held[3] + 4
