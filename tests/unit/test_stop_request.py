"""Signals and the level of the stop request that they become."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGRTMIN, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import STOP_REASONS, StopRequest, StopRequested, signal_of


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGRTMIN)}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) == handler, "the handlers that were there are back"


@pytest.mark.parametrize("main_thread_is_free", [True, False])
@pytest.mark.parametrize(
    ("numbers", "level"),
    [
        ([], StopLevel.NONE),
        ([SIGINT], StopLevel.SAVE),
        ([SIGTERM], StopLevel.SAVE),
        ([SIGHUP, SIGHUP, SIGHUP], StopLevel.SAVE),
        ([SIGTERM, SIGTERM], StopLevel.SAVE),
        ([SIGTERM, SIGINT], StopLevel.SAVE),
        ([SIGINT, SIGTERM, SIGHUP], StopLevel.SAVE),
        ([SIGUSR1], StopLevel.SAVE),
        ([SIGUSR2, SIGTERM], StopLevel.SAVE),
        ([SIGRTMIN], StopLevel.NOW),
        ([SIGRTMIN, SIGTERM], StopLevel.NOW),
        ([SIGINT, SIGINT], StopLevel.KILL),
        ([SIGINT, SIGTERM, SIGINT], StopLevel.KILL),
    ],
)
def test_a_second_ctrl_c_and_the_internal_signal_raise_the_stop_level(
    numbers: list[int], level: StopLevel, main_thread_is_free: bool
) -> None:
    with StopRequest(main_thread_is_free=main_thread_is_free) as request:
        for number in numbers:
            signal.raise_signal(number)
            assert select.select([request], [], [], 0)[0], "a wait would end"
            request.wait(0)
            assert not select.select([request], [], [], 0)[0]
        assert request.level == level
        assert request.reason == (f"stopped by {signal.Signals(numbers[0]).name}" if numbers else None)


def test_signals_of_our_own_commands_name_the_origin_of_the_stop() -> None:
    for number, reason in STOP_REASONS.items():
        with StopRequest() as request:
            signal.raise_signal(number)
            assert (request.level, request.reason) == (StopLevel.SAVE, reason)


def test_a_risen_stop_level_is_reported_once() -> None:
    with StopRequest() as request:
        levels = [request.risen()]
        for number in (SIGINT, SIGTERM, SIGINT, SIGINT):
            signal.raise_signal(number)
            levels.append(request.risen())
    assert levels == [StopLevel.NONE, StopLevel.SAVE, StopLevel.NONE, StopLevel.KILL, StopLevel.NONE]


@pytest.mark.parametrize("number", [SIGINT, SIGHUP])
def test_an_ignored_signal_of_the_terminal_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(number)
            assert request.level == StopLevel.NONE
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("level", [StopLevel.SAVE, StopLevel.NOW])
def test_the_signal_of_a_stop_level_sets_that_level_also_where_it_was_ignored(
    level: StopLevel,
) -> None:
    before = signal.signal(signal_of(level), signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(signal_of(level))
            assert request.level == level
    finally:
        signal.signal(signal_of(level), before)


def test_a_call_that_blocks_is_left_by_a_request_also_by_one_that_came_before() -> None:
    with StopRequest() as request:
        threading.Timer(0.05, os.kill, (os.getpid(), SIGTERM)).start()
        with pytest.raises(StopRequested), request.raising():
            threading.Event().wait(60)
        with pytest.raises(StopRequested), request.raising():
            pass
        signal.raise_signal(SIGTERM)  # afterwards none raises
