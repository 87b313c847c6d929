from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_group import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Processes with torch loaded, for functions that join a process group."""
    started = Processes()
    yield started
    started.close()
