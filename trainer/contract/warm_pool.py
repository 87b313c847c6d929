"""Request that a supervisor of the warm pool sends to its node agent."""

from __future__ import annotations

import msgspec

READY = b"ready\n"
"""Line that the node agent writes to standard output once torch is loaded."""


class WarmRequest(msgspec.Struct, kw_only=True):
    """Run that a node agent with torch loaded is to start: one line of JSON on its standard input."""

    words: list[str]
    """The command line of ``python -m trainer``."""
    environment: dict[str, str]
    """The complete environment of the run."""
    log: str
    """File to which standard output and error are appended."""
