from __future__ import annotations

import pytest
import torch
from text_cache import own_cache as own_cache


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute as a rank does: threads that wait for each other on taken cores take several times as long."""
    torch.set_num_threads(1)
