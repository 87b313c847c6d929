"""No key, click or resize crashes the console while a run is being written."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from pty_harness import Terminal
from test_console_speed import GPUTRAIN, live_run

KEYS = [
    *"srltgbhfopzywmjkTnNkL?/aA434Fec[]{}%",
    *("\x1b", "\r", "\t", "\x7f", "\x10", "host:", "late>5", "日本", "\x1b[3~", "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D"),
    *("\x1b[5~", "\x1b[6~", "\x1b[H", "\x1b[F"),
]
"""Keys that do not quit the console and do not stop, delete or launch a run."""
SIZES = [(20, 5), (120, 40), (80, 24), (200, 60), (3, 3), (190, 52), (60, 10), (1, 1)]
SECONDS = 15.0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "ranks"), [(2, 1024), (5, 3), (6, 64)])
def test_no_key_click_or_size_ends_the_console(seed: int, ranks: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    env = {**os.environ, "GPUTRAIN_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done: list[object] = []
    with (
        live_run(env, ranks, 10) as path,
        Terminal([GPUTRAIN, "attach", path.name], env=env, columns=120, rows=40) as terminal,
    ):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and terminal.process.poll() is None:
            draw = chance.random()
            if draw < 0.12:
                done.append(chance.choice(SIZES))
                terminal.resize(*done[-1])  # type: ignore[misc]
            elif draw < 0.3:
                spot = f"{chance.choice((0, 0, 64, 65))};{chance.randint(1, 125)};{chance.randint(2, 38)}"
                done.append(spot)
                terminal.send(f"\x1b[<{spot}M\x1b[<{spot}m")
            else:
                done.append(chance.choice(KEYS))
                terminal.send(str(done[-1]))
            time.sleep(chance.choice((0, 0, 0.01, 0.05, 0.2)))
        assert terminal.process.poll() is None, (done[-10:], terminal.text()[-3000:])
