from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_group import Processes
from rank_group import Gang


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Processes with torch loaded, for functions that join a process group."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Gang]:
    """Two ranks with a process group, for functions that train on it."""
    gang = Gang(2)
    yield gang
    gang.close()
