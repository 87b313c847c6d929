from __future__ import annotations

import os
from pathlib import Path

from manual_clock import ManualClock

from gputrain_tui.lifecycle.directory_watch import SupervisorBeats
from trainer.contract.record import RunDir


def test_a_supervisor_is_silent_from_the_last_change_of_the_locks_time_by_the_readers_own_clock(tmp_path: Path) -> None:
    run_dir, clock = RunDir(tmp_path), ManualClock(100.0)
    run_dir.lock.touch()
    os.utime(run_dir.lock, (5.0, 5.0))  # by the clock of another host
    beats = SupervisorBeats(run_dir, clock=clock)
    silent = []
    for beat in (False, False, True, False, None):
        clock.seconds += 3.0
        if beat:
            os.utime(run_dir.lock, (6.0, 6.0))
        if beat is None:
            run_dir.lock.unlink()  # its disk does not answer
        silent.append(beats.silent_s())
    assert silent == [0.0, 3.0, 0.0, 3.0, 6.0]
