"""Caches of gputrain in tests: one of texts for each test, and one of the options of tasks for all of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def newest_change() -> int:
    """Return when a file was last changed that a task may come from, Unix nanoseconds."""
    return max(path.stat().st_mtime_ns for name in ("tests", "trainer") for path in (ROOT / name).rglob("*.py"))


SHARED = ROOT / ".pytest_cache" / f"options-{newest_change()}"


def with_task_options(home: Path) -> Path:
    """Let a new home know the tasks that the tests before have asked for their options, which imports torch."""
    SHARED.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (home / "cache").symlink_to(SHARED)
    return home


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "text-cache"
    monkeypatch.setenv("GPUTRAIN_CACHE", str(folder))
    return folder
