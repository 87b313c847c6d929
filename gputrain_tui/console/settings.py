"""What the console remembers from one start to the next, and what the environment says about the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gputrain_tui import paths
from trainer.contract.record import write_atomically

FILE = "console.json"


def theme(environ: Mapping[str, str]) -> str | None:
    """Return the theme to start with: the one chosen last, else what the terminal tells of itself."""
    return environ.get("TEXTUAL_THEME") or _kept(environ) or _of_terminal(environ)


def keep_theme(name: str) -> None:
    """Remember a theme; where that cannot be written it holds until the console ends."""
    folder = paths.config_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps({"theme": name}).encode() + b"\n")


def _kept(environ: Mapping[str, str]) -> str | None:
    file: Path = paths.config_folder(environ) / FILE
    with suppress(OSError, ValueError, AttributeError):
        name = json.loads(file.read_text("utf-8")).get("theme")
        return name if isinstance(name, str) else None
    return None


def _of_terminal(environ: Mapping[str, str]) -> str | None:
    """Return the theme for a terminal of sixteen colours, or with a light ground as ``COLORFGBG`` tells it."""
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    light = ground.isdecimal() and int(ground) in (7, *range(9, 16))
    if environ.get("TERM") in ("linux", "xterm-16color", "vt100", "ansi") and not environ.get("COLORTERM"):
        return "ansi-light" if light else "ansi-dark"
    return "textual-light" if light else None
