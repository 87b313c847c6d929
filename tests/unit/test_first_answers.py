from __future__ import annotations

import math

import pytest

from gputrain_tui.hosts.first_answers import FIRST_ANSWER_S, FirstAnswers


@pytest.mark.parametrize(
    ("hosts", "took_s", "now", "left_s"),
    [
        (4, [], 30.0, math.inf),
        (4, [1.0, 0.5], 30.0, math.inf),
        (4, [1.0, 0.5, 1.2], 3.0, FIRST_ANSWER_S - 3.0),
        (6, [1.0, 0.5, 1.2], FIRST_ANSWER_S, 0.0),
        (6, [1.0, 1.0, 8.0], 9.0, 15.0),  # all are slow
        (7, [1.0, 1.0, 8.0], 9.0, math.inf),
        (2, [1.0], 30.0, math.inf),
        (1, [], 30.0, math.inf),
    ],
)
def test_a_host_is_waited_for_as_long_as_half_of_all_are_slow(
    hosts: int, took_s: list[float], now: float, left_s: float
) -> None:
    clock = [0.0]
    first = FirstAnswers(hosts, now=lambda: clock[0])
    for seconds in took_s:
        clock[0] = seconds
        first.add(0.0)
    clock[0] = now
    assert first.left_s(0.0) == left_s
