"""Puts copied text into tmux: as it is set up by default, tmux drops what programs in it send to the clipboard."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

TMUX_TIMEOUT_S = 2.0
"""Seconds after which tmux counts as hung."""


def in_tmux() -> bool:
    """Return whether the terminal is tmux."""
    return bool(os.environ.get("TMUX"))


def load_buffer(text: str) -> None:
    """Make a text tmux's newest buffer, and let tmux put it on the clipboard of the terminal that it is shown in."""
    with suppress(OSError, subprocess.SubprocessError):  # then OSC 52 alone must do
        subprocess.run(
            ["tmux", "load-buffer", "-w", "-"],
            input=text.encode(),
            capture_output=True,
            timeout=TMUX_TIMEOUT_S,
            check=False,
        )
