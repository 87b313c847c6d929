"""Samples per second with balanced shares and with equal ones, alternating, on ranks of which some are slowed.

Two ranks are slowed by work in the task, which takes their cores; three by waits, as there are more ranks than cores.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from trained import train

pytestmark = pytest.mark.benchmark
TASK = f"{Path(__file__).parents[1] / 'support' / 'slowed_task.py'}:SlowedTask"
STEPS, SETTLED = 110, 60


def step_ms(folder: Path, sizes: tuple[object, ...], sample_ms: str, *more: object) -> float:
    """Return the mean time of a step once the shares have settled."""
    ranks = sample_ms.count(",") + 1
    flags = ("--task", TASK, "--samples", 20000, "--optimizer", "sgd", "--lr", 1e-4, "--sample-ms", sample_ms, *more)
    done = train(folder, *flags, *sizes, "--max-updates", STEPS, ranks=ranks)
    assert done.code == 0, done.output
    steps = [event["steps"] for event in done.events_of("step", 0) if event["step"] > SETTLED]
    return done.sum_of("step_ms", 0, after=SETTLED) / sum(steps)


def ratios(folder: Path, total: int, sample_ms: str, *more: object, pairs: int = 3) -> list[float]:
    """Return the samples per second of balanced shares, by those of equal ones, of each pair of trainings."""
    balanced = ("--batch-size", "balanced", "--global-batch-size", total)
    equal = ("--batch-size", total // (sample_ms.count(",") + 1))
    found = []
    for pair in range(pairs):
        sizes = (balanced, equal) if pair % 2 else (equal, balanced)
        times = {each: step_ms(folder / f"{pair}-{each[1]}", each, sample_ms, *more) for each in sizes}
        found.append(times[equal] / times[balanced])
    print(f"balanced by equal, {sample_ms} ms per sample: {', '.join(f'{each:.3f}' for each in found)}")
    return found


def test_two_ranks_at_1_to_3_make_1_7_times_as_many_samples(tmp_path: Path) -> None:
    assert median(ratios(tmp_path, 24, "2,6", "--work")) >= 1.7  # 2.0 at best


def test_three_ranks_at_1_to_2_to_4_come_within_15_percent_of_their_limit(tmp_path: Path) -> None:
    assert median(ratios(tmp_path, 42, "2,4,8")) >= 0.85 * 7 / 3


def test_equal_ranks_at_20_ms_steps_lose_nothing(tmp_path: Path) -> None:
    assert median(ratios(tmp_path, 24, "1.6,1.6", pairs=5)) >= 0.99
