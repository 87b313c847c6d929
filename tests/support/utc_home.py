"""Temporary home for runs, with time zone UTC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(name="home")
def utc_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with monkeypatch.context() as patch:
        patch.setenv("GPUTRAIN_HOME", str(tmp_path))
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield tmp_path
    time.tzset()
