from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "text-cache"
    monkeypatch.setenv("GPUTRAIN_CACHE", str(folder))
    return folder
