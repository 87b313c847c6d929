from __future__ import annotations

import pytest
import torch
from text_cache import own_cache as own_cache


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one thread, as a rank does: more threads than free cores make the tests several times slower."""
    torch.set_num_threads(1)
