"""Expansion of home folders in paths, and the cache folder of the ranks."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(name: str | Path) -> Path:
    """Return a path with ``~`` or ``~user`` expanded; unchanged, as in a shell, if there is no such user."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser() fails on an unknown user


def cache_folder() -> Path:
    """Return ``$GPUTRAIN_CACHE``, or the platform's cache folder of the user."""
    chosen = os.environ.get("GPUTRAIN_CACHE")
    if chosen:
        return expand_home(chosen)
    import platformdirs  # this file is also for hosts without it

    return platformdirs.user_cache_path("gputrain")
