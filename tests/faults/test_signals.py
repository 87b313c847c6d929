"""A person, a shell or a scheduler ends a run: the signals, the exit codes, the recorded reason."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bench import FOR_EVER, LIMIT_S, Bench, node_agent_pid, supervisor_pid, until
from checkpoint_log import newest
from signals import traced

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle import attempt_outcome, leftovers
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import RunDir

Victim = Callable[[subprocess.Popen[str], Run], int]
FOREGROUND: Victim = lambda process, _: process.pid  # noqa: E731
SUPERVISOR: Victim = lambda _, run: supervisor_pid(run)  # noqa: E731
NODE: Victim = lambda _, run: node_agent_pid(run)  # noqa: E731


def saved_step(run: Run) -> int:
    found = newest(run.dir.checkpoints)
    assert found is not None
    return int(found[1]["updates"])


def assert_nothing_is_left(run: Run) -> None:
    assert leftovers.processes_of(run.dir.path) == []
    assert list(run.dir.path.rglob("*.tmp")) == []


@pytest.mark.parametrize(
    ("victim", "number", "cause"),
    [
        pytest.param(FOREGROUND, signal.SIGTERM, "stopped by SIGTERM", id="foreground TERM"),
        pytest.param(FOREGROUND, signal.SIGHUP, "stopped by SIGHUP", id="foreground HUP", marks=pytest.mark.slow),
        pytest.param(SUPERVISOR, signal.SIGHUP, "stopped by SIGHUP", id="supervisor HUP", marks=pytest.mark.slow),
        pytest.param(NODE, signal.SIGTERM, "node 0 was stopped on localhost", id="node TERM"),
        pytest.param(NODE, signal.SIGHUP, "node 0 was stopped on localhost", id="node HUP", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_process_saves_the_run_and_names_the_signal(
    bench: Bench, victim: Victim, number: signal.Signals, cause: str
) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    run = bench.await_training()
    os.kill(victim(process, run), number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    (ended,) = bench.runs()
    assert (ended.state, ended.status.exit_code) == ("stopped", 130)
    step = saved_step(run)
    path = run.dir.checkpoints / f"step_{step:08}.pt"
    assert ended.status.message == f"{cause} at step {step}, saved {path}"
    assert ended.status.message in err
    assert_nothing_is_left(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_node_that_is_stopped_before_it_answers_is_stopped_and_not_failed(
    bench: Bench, number: signal.Signals
) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    until(lambda: bench.runs() and bench.runs()[0].dir.attempt.exists())
    run = bench.runs()[0]
    os.kill(node_agent_pid(run), number)
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, bench.runs()[0].state) == (130, "stopped")
    assert_nothing_is_left(run)


@pytest.mark.parametrize(
    ("code", "words", "reported", "expected"),
    [
        (1, "Could not import runpy module\nTraceback: …\n\nKeyboardInterrupt\n", False, -signal.SIGINT),
        (1, "KeyboardInterrupt\n", True, 1),  # its node agent was up, and reports its own outcome
        (1, "KeyboardInterrupt: of the script's own\n", False, 1),
        (1, "", False, 1),
        (2, "KeyboardInterrupt\n", False, 2),
    ],
)
def test_a_node_that_is_interrupted_while_python_starts_was_not_wrong(
    tmp_path: Path, code: int, words: str, reported: bool, expected: int
) -> None:
    run_dir = RunDir(tmp_path)
    for path in (run_dir.node_log(0), run_dir.node_result(0)):
        path.parent.mkdir()
    run_dir.node_log(0).write_text(words)
    if reported:
        run_dir.node_result(0).write_bytes(msgspec.json.encode(NodeOutcome(node=0, host="here", exit_code=code)))
    assert attempt_outcome.node_end(run_dir, 0, [0], {}, code).exit_code == expected


def test_a_terminal_that_is_closed_stops_the_run_in_order_however_often_it_hangs_up(bench: Bench) -> None:
    main, terminal = pty.openpty()
    process = bench.start(
        "run", bench.recipe(FOR_EVER), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    run = bench.await_training()
    os.close(main)  # whatever is written to the terminal from here on is an input/output error
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        until(lambda: bench.runs()[0].state != "running")
    assert process.wait(LIMIT_S) == 130
    assert bench.runs()[0].status.message == (
        f"stopped by SIGHUP at step {saved_step(run)}, saved {run.dir.checkpoints}/step_{saved_step(run):08}.pt"
    )
    assert_nothing_is_left(run)


def test_ctrl_c_reaches_a_supervisor_that_a_signal_has_stopped(bench: Bench) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    run = bench.await_training()
    os.kill(supervisor_pid(run), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert f"saved {run.dir.checkpoints}/step_{saved_step(run):08}.pt" in err
    assert_nothing_is_left(run)


def test_ctrl_c_ends_a_run_whose_supervisor_nothing_can_reach(bench: Bench) -> None:
    process = bench.start("run", bench.torch_free_recipe())
    run = bench.await_training()
    with traced(supervisor_pid(run)):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, bench.runs()[0].state) == (130, "stopped"), err
    assert_nothing_is_left(run)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_trainer_alone_saves_when_its_terminal_is_closed(bench: Bench, ranks: int) -> None:
    folder, data = bench.folder / "run", bench.recipe().with_name("text.txt")
    flags = f"--cpu --distributed-world-size {ranks} --task lm --batch-size 4 --max-updates {FOR_EVER} --threads 1"
    sizes = f"--data {data} --context 16 --dim 8 --layers 1 --heads 1 --run-dir {folder}"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *flags.split(), *sizes.split()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: all(last_step(RunDir(folder), rank) is not None for rank in range(ranks)))
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    found = newest(folder / "checkpoints")
    assert found is not None
    assert f"stopped at step {found[1]['updates']}, saved {found[0]}" in err


def test_ctrl_c_that_also_ends_the_reader_of_the_output_still_saves(bench: Bench) -> None:
    reader, writer = os.pipe()
    process = bench.start("run", bench.recipe(FOR_EVER), stdout=writer, stderr=writer)
    os.close(writer)
    run = bench.await_training()
    os.close(reader)  # as `tee` is ended by the same Ctrl-C
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    assert saved_step(run) > 0
    assert_nothing_is_left(run)


def test_a_closed_output_pipe_does_not_end_a_run(bench: Bench) -> None:
    reader, writer = os.pipe()
    process = bench.start("run", bench.torch_free_recipe(100), stderr=writer)
    os.close(writer)
    bench.await_training()
    os.close(reader)
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, bench.runs()[0].state) == (0, "finished")


def test_json_whose_reader_goes_away_ends_the_run_once_it_is_saved(bench: Bench) -> None:
    reader, writer = os.pipe()
    process = bench.start("run", bench.recipe(FOR_EVER), "--json", stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    _, err = process.communicate(timeout=LIMIT_S)
    run = bench.runs()[0]
    assert (process.returncode, run.state) == (141, "stopped")
    assert "the reader of standard output has closed it, which stops the run\n" in err
    assert_nothing_is_left(run)


@pytest.mark.parametrize("words", [["--json"], []], ids=["json", "shown"])
def test_a_full_disk_behind_the_output_changes_the_exit_code_and_nothing_about_the_run(
    bench: Bench, words: list[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        streams = {"stdout": full} if words else {"stdout": full, "stderr": full}
        process = bench.start("run", bench.torch_free_recipe(5), *words, **streams)
        _, err = process.communicate(timeout=LIMIT_S)
    (run,) = bench.runs()
    assert (process.returncode, run.state, run.status.exit_code) == (1, "finished", 0)
    assert not words or "cannot write standard output: No space left on device" in err
