"""Settings saved between starts: the theme, with a default by terminal, and notices at the end of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from gputrain_tui import paths
from trainer.contract.record import write_atomically

FILE = "console.json"


def theme(environ: Mapping[str, str]) -> str | None:
    """Return the theme to start with: ``TEXTUAL_THEME``, the saved one, or one by terminal; None: Textual's default.

    A terminal with at most sixteen colours gets one of the ``ansi-`` themes, even if another theme is saved.
    """
    if chosen := environ.get("TEXTUAL_THEME"):
        return chosen
    chosen = _saved(environ).get("theme")
    saved = chosen if isinstance(chosen, str) else None
    if has_few_colours(environ) and not (saved or "").startswith("ansi-"):
        is_light = saved.endswith("-light") if saved else _is_light(environ)
        return "ansi-light" if is_light else "ansi-dark"
    return saved or ("textual-light" if _is_light(environ) else None)


def has_few_colours(environ: Mapping[str, str]) -> bool:
    """Return whether a terminal has at most sixteen colours, such as ``TERM=xterm``, or ``NO_COLOR`` is set."""
    if "NO_COLOR" in environ:
        return True
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return False
    if environ.get("TEXTUAL_COLOR_SYSTEM", "auto") != "auto":
        return environ["TEXTUAL_COLOR_SYSTEM"] == "standard"
    name = environ.get("TERM", "").strip().lower()
    return bool(name) and name.rpartition("-")[2] not in ("256color", "kitty")  # Rich uses more for these


def notifies(environ: Mapping[str, str]) -> bool:
    """Return whether the console rings and notifies when a run ends; True by default."""
    return _saved(environ).get("notify") is not False


def save(name: Literal["theme", "notify"], value: str | bool) -> None:
    """Save a setting for the next start; nothing happens if the folder cannot be written."""
    folder = paths.config_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps({**_saved(os.environ), name: value}).encode() + b"\n")


def _saved(environ: Mapping[str, str]) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        saved = json.loads((paths.config_folder(environ) / FILE).read_text("utf-8"))
        return saved if isinstance(saved, dict) else {}
    return {}


def _is_light(environ: Mapping[str, str]) -> bool:
    """Return whether ``COLORFGBG`` names a light background."""
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return ground.isdecimal() and int(ground) in (7, *range(9, 16))
