"""Speed of the console, measured from outside in a pseudo-terminal: start, paint, keys, and CPU time at rest.

Each figure is compared with a baseline of the same run: importing torch, decoding the same bytes, or a Textual app of
one line (``bare_app.py``). The load average is printed with it, and the waits of a key for a core separately.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import synthetic_run
from pty_harness import Terminal, Usage, latencies

from trainer.contract.record import decode_events

pytestmark = pytest.mark.benchmark

GPUTRAIN = Path(sys.executable).parent / "gputrain"
GENERATOR = Path(__file__).with_name("synthetic_run.py")
BARE_APP = [sys.executable, Path(__file__).with_name("bare_app.py")]
DOWN = "\x1b[B"
CURSOR = r"▸ +{} +node"
"""Start of a rank's line while the cursor is on it."""
MOST_OF_DECODING = 25.0
"""Maximum CPU time of the console over that of decoding the bytes that it reads: measured 15 on a busy machine."""
MOST_OF_BARE_KEY = 10.0
"""Maximum latency of a key on a full screen of 1,024 ranks over that of the one-line app."""
MOST_OF_BARE_REST = 4.0
"""Maximum CPU time at rest over that of the one-line app: measured 2.5 on a busy machine, with ticks of 10 ms."""
SHOWN = "Quit"
"""Text in the last line of every screen: once it is there, the frame is complete."""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "GPUTRAIN_HOME": str(tmp_path)}


@contextmanager
def live_run(env: dict[str, str], ranks: int, rate: float) -> Iterator[Path]:
    """Start a process that writes a run until the block ends; yield the run directory."""
    words = [sys.executable, GENERATOR, "live", f"{env['GPUTRAIN_HOME']}/runs", "--ranks", str(ranks)]
    writer = subprocess.Popen([*words, "--rate", str(rate)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert writer.stdout is not None
        yield Path(writer.stdout.readline().strip())
    finally:
        writer.kill()
        writer.wait()


def report(figures: str) -> None:
    print(f"\n{figures}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", end=" ")


def usage_text(usage: Usage) -> str:
    return (
        f"{usage.cpu_percent:.1f} % of a core, {usage.bytes_per_s / 1e3:.0f} kB/s to the terminal, "
        f"{usage.rss_bytes / 2**20:.0f} MiB"
    )


def test_the_first_frame_comes_in_a_quarter_of_the_time_of_importing_torch(env: dict[str, str]) -> None:
    first_frames, ratios = [], []
    for _ in range(8):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, env=env, capture_output=True)
        torch_s = time.perf_counter() - begin
        with Terminal([GPUTRAIN], env=env, columns=120, rows=40) as terminal:
            first_s = terminal.wait_for(SHOWN) - terminal.started
            assert terminal.modules("torch", "numpy") == []
            assert terminal.leave() == 0
        first_frames.append(first_s)
        ratios.append(first_s / torch_s)
    # The first pair fills the page cache.
    first_s, ratio = statistics.median(first_frames[1:]), statistics.median(ratios[1:])
    report(f"first frame {first_s:.2f} s (best {min(first_frames):.2f}), {ratio:.2f} of importing torch")
    assert ratio <= 0.25


def decode_s_per_byte(run: Path) -> float:
    """Return the CPU time of decoding a run's record, in seconds per byte."""
    data = b"".join(file.read_bytes() for file in sorted((run / "events").iterdir())[:200])
    begin = time.process_time()
    assert list(decode_events(data))
    return (time.process_time() - begin) / len(data)


def bare_latencies(env: dict[str, str]) -> tuple[float, float]:
    """Return the latency of keys in the one-line app, ms: median and 95th percentile."""
    chance = random.Random(2)
    with Terminal(BARE_APP, env=env, columns=190, rows=52) as terminal:
        terminal.wait_for(SHOWN)
        presses = [(DOWN, rf"press {number}\. ") for number in range(1, 81)]
        found = latencies(terminal, presses, pause=lambda: 0.05 + 0.2 * chance.random())
        assert terminal.leave() == 0
    return percentiles([latency.own_ms for latency in found])


def test_1024_ranks_at_10_events_a_second_cost_a_fixed_multiple_of_decoding_them(env: dict[str, str]) -> None:
    seconds = 15
    with (
        live_run(env, 1024, 10) as path,
        Terminal([GPUTRAIN, "attach", path.name], env=env, columns=190, rows=52) as terminal,
    ):
        terminal.wait_for(SHOWN)
        terminal.usage(4)
        usage = terminal.usage(seconds)
        decoding = usage.cpu_percent / 100 * seconds / (decode_s_per_byte(path) * usage.read_bytes)
        report(f"{usage_text(usage)}; {decoding:.1f} times decoding the same bytes")
        assert usage.read_bytes > seconds * 9 * 1024 * 300, "it read the events written meanwhile"
        terminal.send(DOWN)
        terminal.wait_for(re.compile(CURSOR.format(0)))
        chance = random.Random(1)
        presses = [(DOWN, CURSOR.format(rank)) for rank in range(1, 81)]
        found = latencies(terminal, presses, pause=lambda: 0.05 + 0.2 * chance.random())
        p50, p95 = percentiles([latency.own_ms for latency in found])
        seen = percentiles([latency.ms for latency in found])
        report(f"key to paint p50 {p50:.0f} ms, p95 {p95:.0f} ms; with waits for cores {seen[0]:.0f} and {seen[1]:.0f}")
        assert terminal.leave() == 0
        bare_p50, bare_p95 = bare_latencies(env)
    report(
        f"one-line app {bare_p50:.1f} and {bare_p95:.1f} ms: {p50 / bare_p50:.1f} and {p95 / bare_p95:.1f} times that"
    )
    assert decoding <= MOST_OF_DECODING
    assert p50 <= MOST_OF_BARE_KEY * bare_p50
    assert p95 <= MOST_OF_BARE_KEY * bare_p95


def test_100000_events_a_second_are_read_without_falling_behind(env: dict[str, str]) -> None:
    with (
        live_run(env, 1024, 100) as path,
        Terminal([GPUTRAIN, "attach", path.name], env=env, columns=190, rows=52) as terminal,
    ):
        terminal.wait_for(SHOWN)
        terminal.usage(5)
        size = recorded(path)
        usage = terminal.usage(10)
        grown = recorded(path) - size
        report(f"{usage_text(usage)}, read {usage.read_bytes / grown:.2f} of {grown / 370 / 10:.0f} events a second")
        assert terminal.leave() == 0
    assert usage.read_bytes >= 0.95 * grown


def percentiles(values: list[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]


def recorded(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "events").iterdir())


def test_a_console_at_rest_costs_little_more_than_an_app_of_one_line(env: dict[str, str]) -> None:
    run = synthetic_run.whole(Path(env["GPUTRAIN_HOME"]) / "runs", ranks=64, steps=500)
    used = []
    for argv in (BARE_APP, [GPUTRAIN], [GPUTRAIN, "attach", run.id]):
        with Terminal(argv, env=env, columns=190, rows=52) as terminal:
            terminal.wait_for(SHOWN)
            terminal.usage(6)
            usage = terminal.usage(15)
            report(f"{' '.join(str(word) for word in argv[:2])}: {usage_text(usage)}")
            assert terminal.leave() == 0
        used.append(usage.cpu_percent)
    bare, *consoles = used
    assert max(consoles) <= MOST_OF_BARE_REST * bare
