"""Copying text to tmux, which by default ignores OSC 52 from the programs within it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress


def in_tmux() -> bool:
    """Return whether the console runs within tmux."""
    return bool(os.environ.get("TMUX"))


def load_buffer(text: str) -> None:
    """Put a text into tmux's newest buffer, and by tmux into the clipboard of the terminal around it."""
    tmux_timeout_s = 2.0  # seconds after which tmux counts as hung
    with suppress(OSError, subprocess.SubprocessError):  # OSC 52 was sent as well
        subprocess.run(
            ["tmux", "load-buffer", "-w", "-"],
            input=text.encode(),
            capture_output=True,
            timeout=tmux_timeout_s,
            check=False,
        )
