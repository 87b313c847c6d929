"""What holds for all tests."""

from __future__ import annotations

import compileall
import functools
import os
import signal
from pathlib import Path

import examples
import pytest
from cores import lacked_s

HELD_UP_S = 0.05
"""A test of ``timing`` that had to do without a core for so long may have failed by that alone."""
LACKED = pytest.StashKey[float]()
"""The value of ``lacked_s`` when the test began."""

# A pytest in the background of a script or under nohup, as under some CI, inherits an ignored SIGINT or SIGHUP, and so
# would each process that the tests start: the tests that send one would wait for ends that never come.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The console takes its colours from the terminal; its tests take none from that in which they run.
os.environ["TERM"] = "xterm-256color"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples before the tests that have them are read, and compile the packages.

    No process of a test writes bytecode: under a limit on a file's size, which some tests set, CPython 3.11 leaves half
    a ``.pyc``, and no later import of that module works. The workers of xdist do, which begin before the variable is
    set: pytest's own copies of the test files cost seconds in each worker where none are kept.
    """
    examples.configure(config)
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        for package in ("gputrain_tui", "trainer"):
            compileall.compile_dir(Path(__file__).parents[1] / package, quiet=2)
    if is_worker or not config.getoption("numprocesses", None):
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run three tests at a time, most of which wait for processes; what compares speeds or takes the GPU runs alone."""
    wanted = config.option.markexpr.replace("not benchmark", "").replace("not gpu", "")
    return 0 if "benchmark" in wanted or "gpu" in wanted else min(3, 1 + (os.cpu_count() or 1))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have a failed test of ``timing`` run again where the machine, and perhaps nothing else, made it fail."""
    for item in items:
        examples.mark_long(item)
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, condition=functools.partial(_was_held_up, item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note how long cores had been lacking before the test."""
    item.stash[LACKED] = lacked_s()


def _was_held_up(item: pytest.Item) -> bool:
    return lacked_s() - item.stash[LACKED] >= HELD_UP_S
