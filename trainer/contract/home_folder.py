"""Home folders in the names that people write."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(name: str | Path) -> Path:
    """Return a path with ``~`` or ``~user`` replaced; like a shell, left alone where there is no such person."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser() fails on an unknown person
