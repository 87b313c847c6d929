"""Folders of gputrain on this machine, by ``GPUTRAIN_HOME`` or the platform's conventions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.errors import RequestError, require_utf8
from trainer.contract.home_folder import expand_home


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$GPUTRAIN_HOME``, or the platform's user state folder.

    Raises:
        RequestError: its path is not UTF-8, the encoding of a run's record.
    """
    chosen = environ.get("GPUTRAIN_HOME")
    if chosen:
        folder = expand_home(chosen).absolute()
    else:
        import platformdirs  # not needed, and not imported, with GPUTRAIN_HOME

        folder = platformdirs.user_state_path("gputrain", appauthor=False)
    try:
        require_utf8([str(folder)])
    except RequestError as error:
        raise RequestError(f"the folder of the runs, GPUTRAIN_HOME: {error}") from None
    return folder


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the run directories."""
    return home(environ) / "runs"


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's settings: themes, recipes; under ``$GPUTRAIN_HOME`` when that is set."""
    if environ.get("GPUTRAIN_HOME"):
        return home(environ) / "config"
    import platformdirs

    return platformdirs.user_config_path("gputrain", appauthor=False)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of caches: task options, tokenised text; under ``$GPUTRAIN_HOME`` when that is set."""
    if environ.get("GPUTRAIN_HOME"):
        return home(environ) / "cache"
    import platformdirs

    return platformdirs.user_cache_path("gputrain", appauthor=False)
