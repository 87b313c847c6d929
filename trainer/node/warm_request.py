"""What a node's parent that waits and the supervisor that waits with it say to each other."""

from __future__ import annotations

import msgspec

FOLDER = "GPUTRAIN_WARM"
"""Environment variable: a path that this process alone is given, and that never exists. Every process that comes of it
has it in its environment, and is found by it; none can have the run's own mark, which is not known yet."""
READY = b"ready\n"
"""Said on standard output once torch is loaded."""


class Request(msgspec.Struct, kw_only=True):
    """What the process is to become: one line of JSON on standard input."""

    words: list[str]
    """The command line of ``python -m trainer``."""
    environment: dict[str, str]
    """All of it."""
    log: str
    """File to which standard output and error are appended."""
