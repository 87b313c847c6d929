"""The console begins in colours that the terminal has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gputrain_tui.console.settings import theme


@pytest.mark.parametrize(
    ("environ", "kept", "expected"),
    [
        ({"TERM": "xterm-256color"}, None, None),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, None, "textual-light"),
        ({"TERM": "xterm-256color"}, "textual-light", "textual-light"),
        ({"TERM": "xterm"}, None, "ansi-dark"),
        ({"TERM": "linux"}, None, "ansi-dark"),
        ({"TERM": "screen"}, None, "ansi-dark"),
        ({"TERM": "xterm", "COLORFGBG": "0;15"}, None, "ansi-light"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, None, None),
        ({"TERM": "xterm"}, "textual-light", "ansi-light"),
        ({"TERM": "xterm"}, "textual-dark", "ansi-dark"),
        ({"TERM": "xterm", "COLORFGBG": "0;15"}, "ansi-dark", "ansi-dark"),
        ({"TERM": "xterm", "TEXTUAL_THEME": "nord"}, "textual-light", "nord"),
        ({"TERM": "xterm", "TEXTUAL_COLOR_SYSTEM": "256"}, None, None),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, None, "ansi-dark"),
        ({}, None, None),
    ],
)
def test_the_theme_fits_the_terminal(
    environ: dict[str, str], kept: str | None, expected: str | None, tmp_path: Path
) -> None:
    if kept is not None:
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "console.json").write_text(json.dumps({"theme": kept}))
    assert theme({**environ, "GPUTRAIN_HOME": str(tmp_path)}) == expected
