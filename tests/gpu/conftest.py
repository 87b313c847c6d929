"""Tests that need a GPU: run ``python -m pytest -m gpu tests/gpu`` on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

REASON = "needs an NVIDIA GPU that torch can use"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them if there is no GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))
