"""``--fps`` limits the paints of any cause, including a key that is held down."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import synthetic_run
from pty_harness import Terminal

GPUTRAIN = Path(sys.executable).parent / "gputrain"
DOWN = "\x1b[B"
CURSOR = re.compile(r"▸ +(\d+) +node")
"""Start of a rank's line while the cursor is on it."""
HELD_S = 2.0
REPEAT_S = 0.04
"""Interval of a keyboard's key repeat."""


@pytest.mark.parametrize(("words", "least", "most"), [(["--fps", "2"], 2, 2 * HELD_S + 3), ([], 15, 60)])
def test_a_held_key_is_painted_at_the_requested_rate(words: list[str], least: int, most: float, tmp_path: Path) -> None:
    env = {**os.environ, "GPUTRAIN_HOME": str(tmp_path)}
    run = synthetic_run.whole(tmp_path / "runs", ranks=64, steps=20)
    with Terminal([GPUTRAIN, "attach", run.id, *words], env=env, columns=120, rows=60) as terminal:
        terminal.wait_for("Quit")
        terminal.send(DOWN)
        terminal.wait_for(CURSOR)
        since, begin = terminal.written, time.perf_counter()
        while time.perf_counter() - begin < HELD_S:
            terminal.send(DOWN)
            time.sleep(REPEAT_S)
        painted = len(CURSOR.findall(terminal.text(since)))
        written = terminal.written - since
        assert terminal.leave() == 0
    print(
        f"\n{' '.join(words) or 'default'}: {painted / HELD_S:.1f} paints/s, {written / HELD_S / 1e3:.1f} kB/s", end=" "
    )
    assert least <= painted <= most
