"""Where gputrain keeps its files on this machine: one place that knows ``GPUTRAIN_HOME`` and the platform's folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """``$GPUTRAIN_HOME``, or the platform's user state folder."""
    chosen = environ.get("GPUTRAIN_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # here, because most scripts and all tests set GPUTRAIN_HOME

    return platformdirs.user_state_path("gputrain", appauthor=False)


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the run directories."""
    return home(environ) / "runs"


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """What a person sets once: themes, hosts. Under ``$GPUTRAIN_HOME`` when that is set."""
    if environ.get("GPUTRAIN_HOME"):
        return home(environ) / "config"
    import platformdirs

    return platformdirs.user_config_path("gputrain", appauthor=False)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """What can be made again: descriptions of tasks, tokenised text. Under ``$GPUTRAIN_HOME`` when that is set."""
    if environ.get("GPUTRAIN_HOME"):
        return home(environ) / "cache"
    import platformdirs

    return platformdirs.user_cache_path("gputrain", appauthor=False)
