"""Colour ramps, the only colours that are not theme variables.

Warm colours mean waiting, cool ones work; red marks only what needs attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.color import Color
from rich.style import Style
from textual.app import App

from gputrain_tui.state.totals import PHASES

HEAT_LEVELS = 8
"""Number of heat levels, few, so that adjacent cells are often equal, merge into one piece and repaint fast."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Colours for one kind of terminal and background."""

    heat: tuple[str, ...]
    phases: tuple[str, ...]
    shades: bool = True
    """Whether the terminal has shades between background and text colour, so that areas can be filled."""
    symbols: bool = False
    plain_cursor: bool = False
    """Whether all text on the cursor's background has one colour, since not all sixteen can be read there."""


DARK = Ramp(
    heat=("#18222d", "#1a3145", "#1d4660", "#2b6580", "#57887c", "#c0a04a", "#e58338", "#e5484d"),
    phases=("#d6b04f", "#5fa8dc", "#376f9f", "#b184d1", "#58ab96", "#3d4650"),
)
LIGHT = Ramp(
    heat=("#e6edf2", "#cfdfe9", "#abc9db", "#7cafc9", "#74a78b", "#d6ab33", "#df7a26", "#c62f35"),
    phases=("#c08a1e", "#3d8fcb", "#1f5d8f", "#8e5bb5", "#2e8873", "#b4bcc4"),
)
SIXTEEN = Ramp(
    heat=("black", "black", "bright_black", "blue", "cyan", "yellow", "bright_yellow", "red"),
    phases=("yellow", "bright_blue", "blue", "magenta", "cyan", "bright_black"),
    shades=False,
    plain_cursor=True,
)
SIXTEEN_LIGHT = Ramp(
    heat=("bright_white", "bright_white", "white", "bright_blue", "cyan", "bright_yellow", "yellow", "red"),
    phases=SIXTEEN.phases,
    shades=False,
    plain_cursor=True,
)
LIGHT_THEME = {
    "background": "#f4f4f2",
    "surface": "#ececea",
    "panel": "#e1e5e8",
    "text-accent": "#7f4a00",
    "text-warning": "#8f3d00",
    "text-success": "#1b6b37",
}
"""Variables of the light theme whose colours in Textual have too little contrast, above all on the cursor's line."""
PLAIN = Ramp(heat=("default",) * HEAT_LEVELS, phases=("default",) * len(PHASES), shades=False, symbols=True)


def ramp_for(app: App[object]) -> Ramp:
    """Return the ramp for the app's theme and terminal."""
    if app.no_color:
        return PLAIN
    dark = app.current_theme.dark
    if app.native_ansi_color or (app.console.color_system == "standard" and not app.is_headless):
        return SIXTEEN if dark else SIXTEEN_LIGHT
    return DARK if dark else LIGHT


TEXT_ON_CURSOR = Style(color=Color.parse("bright_white"), dim=False)
"""Style of text on the cursor's background if ``plain_cursor``."""


@lru_cache(maxsize=512)
def pair(front: str, back: str | None = None) -> Style:
    """Return the style of one colour on another, or on the background."""
    return Style(color=Color.parse(front), bgcolor=None if back is None else Color.parse(back))
