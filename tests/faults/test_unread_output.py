"""Output that is not read: a run can still be stopped, and a slow reader still gets everything."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
from collections.abc import Iterator

import pytest
from bench import LIMIT_S, Bench, until

from gputrain_tui.lifecycle import leftovers

SMALL = 4096
"""The smallest pipe: full after a few lines."""

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A small pipe without a reader."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALL)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def is_full(writer: int) -> bool:
    return not select.select([], [writer], [], 0)[1]


def assert_stopped_in_order(bench: Bench, process: subprocess.Popen[str], number: signal.Signals) -> None:
    assert process.wait(LIMIT_S) == 130
    (run,) = bench.runs()
    assert run.state == "stopped"
    assert (run.status.message or "").startswith(f"stopped by {number.name}")
    assert leftovers.processes_of(run.dir.path) == []


SIGNALS = [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))]
"""One by default: tests/faults/test_signals.py has them all, and Ctrl-C is the one of the held terminal below."""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_works_while_the_events_are_not_read(bench: Bench, pipe: Pipe, number: signal.Signals) -> None:
    process = bench.start("run", bench.torch_free_recipe(), "--json", stdout=pipe[1], stderr=subprocess.DEVNULL)
    bench.await_training()
    until(lambda: is_full(pipe[1]))
    process.send_signal(number)
    assert_stopped_in_order(bench, process, number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_works_while_the_narration_is_not_read(bench: Bench, pipe: Pipe, number: signal.Signals) -> None:
    os.write(pipe[1], b"." * SMALL)
    process = bench.start("run", bench.torch_free_recipe(), stdout=subprocess.DEVNULL, stderr=pipe[1])
    bench.await_training()
    process.send_signal(number)
    assert_stopped_in_order(bench, process, number)


def test_ctrl_c_works_on_a_terminal_that_is_held_by_ctrl_s(bench: Bench) -> None:
    main, terminal = pty.openpty()
    words = ["run", bench.torch_free_recipe()]
    process = bench.start(*words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    bench.await_training()
    termios.tcflow(terminal, termios.TCOOFF)
    process.send_signal(signal.SIGINT)
    assert_stopped_in_order(bench, process, signal.SIGINT)
    os.close(terminal)
    os.close(main)


def test_a_terminal_that_is_let_go_again_shows_how_the_run_ended(bench: Bench) -> None:
    main, terminal = pty.openpty()
    words = ["run", bench.torch_free_recipe(50)]
    process = bench.start(*words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    bench.await_training()
    termios.tcflow(terminal, termios.TCOOFF)
    until(lambda: bench.runs()[0].state == "finished")
    termios.tcflow(terminal, termios.TCOON)
    terminal_output = bytearray()
    while b"record " not in terminal_output:
        terminal_output += os.read(main, 1 << 16)
    assert process.wait(LIMIT_S) == 0
    assert terminal_output.count(b"finished") == 1
    os.close(terminal)
    os.close(main)


def test_a_reader_that_is_slow_still_gets_every_event(bench: Bench, pipe: Pipe) -> None:
    process = bench.start("run", bench.torch_free_recipe(200), "--json", stdout=pipe[1], stderr=subprocess.DEVNULL)
    until(lambda: bench.runs() and bench.runs()[0].state == "finished")
    assert is_full(pipe[1])
    read = bytearray()
    while not read.endswith(b"}\n") or b'"run_ended"' not in read:
        read += os.read(pipe[0], SMALL)
    assert process.wait(LIMIT_S) == 0
    events = [json.loads(line) for line in read.splitlines()]
    assert events[-1]["type"] == "run_ended"
    for rank in (0, 1):
        steps = [event for event in events if event["type"] == "step" and event["rank"] == rank]
        assert sum(event["steps"] for event in steps) == 200


def test_an_ended_run_waits_for_its_reader_until_interrupted(bench: Bench, pipe: Pipe) -> None:
    process = bench.start("run", bench.torch_free_recipe(200), "--json", stdout=pipe[1], stderr=subprocess.DEVNULL)
    until(lambda: bench.runs() and bench.runs()[0].state == "finished")
    assert is_full(pipe[1])
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0, "what was trained is whole, whoever reads of it"
