"""Expansion of home folders in paths."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(name: str | Path) -> Path:
    """Return a path with ``~`` or ``~user`` expanded; unchanged, as in a shell, if there is no such user."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser() fails on an unknown user
