"""Settings of all tests: signals, terminal, threads, bytecode, examples, and reruns of timing tests."""

from __future__ import annotations

import compileall
import functools
import gc
import os
import signal
import sys
from pathlib import Path

import examples
import pytest
from _pytest.assertion import rewrite
from cores import lacked_s

HELD_UP_S = 0.05
"""Seconds of waiting for a core that may alone have made a ``timing`` test fail."""
LABS = frozenset({"end_to_end", "faults", "cluster"})
"""Folders of tests that start whole runs, many at a time: each of their tests depends on time."""
LACKED = pytest.StashKey[float]()
"""Value of ``lacked_s`` at the start of the test."""

# In the background of a script or under nohup, as in some CI, pytest inherits an ignored SIGINT or SIGHUP, and so would
# each process that the tests start: a test that sends one would wait until its time-out.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The console takes its colours from the terminal; the tests must not depend on the one in which they run.
os.environ["TERM"] = "xterm-256color"


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples and how threads wait, compile packages and tests; test processes write no bytecode.

    Under a limit on file sizes, which some tests set, CPython 3.11 leaves a truncated ``.pyc``, and every later import
    of that module fails. xdist workers do write bytecode, because they start before the variable is set.
    """
    examples.configure(config)
    if not _runs_alone(config):
        # Else threads of torch spin while they wait for each other: where cores are taken, for twice the CPU time.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    is_worker = hasattr(config, "workerinput")
    if is_worker:
        gc.disable()  # until pytest_collection_finish: what a collection makes stays, and is a quarter of its time
    if is_worker or not config.getoption("numprocesses", None):
        # .ci/run measures the processes of pytest. A child would import coverage first, which takes a third of a second
        # or more, and would not be the fresh interpreter that some tests look at.
        os.environ.pop("COVERAGE_PROCESS_START", None)
    if not is_worker:
        for package in ("gputrain_tui", "trainer"):
            compileall.compile_dir(Path(__file__).parents[1] / package, quiet=2)
        if config.getoption("numprocesses", None) and not sys.dont_write_bytecode:
            _rewrite_tests(config)
    if is_worker or not config.getoption("numprocesses", None):
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what lives as long as a worker out of its garbage collections: pytest's items, torch, textual.

    With larger generations, too, tests of the console take a quarter less time. Benchmarks have no workers.
    """
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def _rewrite_tests(config: pytest.Config) -> None:
    """Store pytest's own bytecode of the test files, which otherwise each worker makes, for half of its start."""
    gc.disable()
    state = config.stash[rewrite.assertstate_key]
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    for file in {file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])}:
        stored = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if file.is_file() and rewrite._read_pyc(file, stored) is None and rewrite.try_makedirs(stored.parent):
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, stored)
    gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return up to four workers, because most tests wait for processes; benchmarks and GPU tests run one by one."""
    return 0 if _runs_alone(config) else min(4, 2 + (os.cpu_count() or 1))


def _runs_alone(config: pytest.Config) -> bool:
    """Return whether benchmarks or tests on GPUs are selected, which measure what a user has."""
    selected = config.option.markexpr.replace("not benchmark", "").replace("not gpu", "")
    return "benchmark" in selected or "gpu" in selected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow examples, and rerun failed tests that had to wait for a core: a ``timing`` one twice, of labs once."""
    for item in items:
        examples.mark_long(item)
        reruns = 2 if item.get_closest_marker("timing") else int(item.path.parent.name in LABS)
        if reruns and not item.get_closest_marker("benchmark"):
            item.add_marker(pytest.mark.flaky(reruns=reruns, condition=functools.partial(_was_held_up, item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Store the waits for cores before the test."""
    item.stash[LACKED] = lacked_s()


def _was_held_up(item: pytest.Item) -> bool:
    return lacked_s() - item.stash[LACKED] >= HELD_UP_S
