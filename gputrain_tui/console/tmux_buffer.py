"""Copying text to tmux, which by default ignores OSC 52 from the programs within it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

TMUX_TIMEOUT_S = 2.0
"""Seconds after which tmux counts as hung."""


def in_tmux() -> bool:
    """Return whether the console runs within tmux."""
    return bool(os.environ.get("TMUX"))


def load_buffer(text: str) -> None:
    """Put a text into tmux's newest buffer, and by tmux into the clipboard of the terminal around it."""
    with suppress(OSError, subprocess.SubprocessError):  # OSC 52 was sent as well
        subprocess.run(
            ["tmux", "load-buffer", "-w", "-"],
            input=text.encode(),
            capture_output=True,
            timeout=TMUX_TIMEOUT_S,
            check=False,
        )
