"""The request that a waiting node agent gets from the supervisor that waits with it."""

from __future__ import annotations

import msgspec

READY = b"ready\n"
"""Said on standard output once torch is loaded."""


class WarmRequest(msgspec.Struct, kw_only=True):
    """What the process is to become: one line of JSON on standard input."""

    words: list[str]
    """The command line of ``python -m trainer``."""
    environment: dict[str, str]
    """All of it."""
    log: str
    """File to which standard output and error are appended."""
