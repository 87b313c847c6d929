"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest

# A pytest in the background of a script, as under some CI, inherits an ignored SIGINT, and so would each process that
# the tests start: the tests that send one would wait for ends that never come.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run two tests at a time, most of which wait for processes; what compares speeds runs alone."""
    measures = "benchmark" in config.option.markexpr.replace("not benchmark", "")
    return 0 if measures else min(2, os.cpu_count() or 1)
