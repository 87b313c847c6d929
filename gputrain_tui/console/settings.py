"""Settings kept between starts: the theme, with a default by the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gputrain_tui import paths
from trainer.contract.record import write_atomically

FILE = "console.json"


def theme(environ: Mapping[str, str]) -> str | None:
    """Return the theme to start with: from the environment, the last choice, or the kind of terminal."""
    return environ.get("TEXTUAL_THEME") or _kept(environ) or _of_terminal(environ)


def keep_theme(name: str) -> None:
    """Save a theme for the next start, if the folder can be written."""
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
    """Return the theme by ``TERM`` and ``COLORFGBG``: sixteen colours, a light ground."""
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    light = ground.isdecimal() and int(ground) in (7, *range(9, 16))
    if environ.get("TERM") in ("linux", "xterm-16color", "vt100", "ansi") and not environ.get("COLORTERM"):
        return "ansi-light" if light else "ansi-dark"
    return "textual-light" if light else None
