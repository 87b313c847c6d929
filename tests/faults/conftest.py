from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Bench

from gputrain_tui.lifecycle import leftovers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for run in bench.runs():
        assert leftovers.kill_processes(run.dir.path) == []
