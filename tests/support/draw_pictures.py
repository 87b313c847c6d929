"""Draw scenes of the console as SVG files.

``python tests/support/draw_pictures.py`` draws the README's picture. With names of scenes it draws these into
``--out``, in each ``--size`` and ``--theme``, to check a changed screen by eye.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from unittest import mock

from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from scenes import SCENES, THEMES, fixed_place, playing

README_PICTURE = Path(__file__).parents[1] / "golden" / "pictures" / "run.svg"
README_SIZE = (170, 52)
"""Columns and lines that fit all panels of the README's run."""


async def picture(name: str, size: tuple[int, int], theme: str) -> str:
    """Return a scene as SVG; theme ``ansi-light`` uses the ANSI colours of a light terminal."""
    async with playing(SCENES[name], size) as app:
        if theme != "ansi-light":
            return str(app.export_screenshot(title="gputrain"))
        with mock.patch("rich.console.SVG_EXPORT_THEME", DEFAULT_TERMINAL_THEME):
            return str(app.export_screenshot(title="gputrain"))


def draw(path: Path, name: str, size: tuple[int, int], theme: str) -> None:
    """Write the picture of a scene and print its path."""
    with tempfile.TemporaryDirectory() as folder, fixed_place(Path(folder), theme):
        found = asyncio.run(picture(name, size, theme))
    path.write_text(found, encoding="utf-8")
    print(path)


def size_of(text: str) -> tuple[int, int]:
    """Return the columns and lines of ``80x24``."""
    columns, lines = text.split("x")
    return int(columns), int(lines)


def main() -> None:
    """Draw the requested pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"all, or some of {', '.join(SCENES)}")
    parser.add_argument("--size", action="append", type=size_of, metavar="COLUMNSxLINES")
    parser.add_argument("--theme", action="append", choices=THEMES)
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args()
    if not args.scenes:
        draw(README_PICTURE, "run", README_SIZE, "dark")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(SCENES) if args.scenes == ["all"] else args.scenes
    if unknown := set(names) - set(SCENES):
        parser.error(f"no scene {', '.join(sorted(unknown))}: there are {', '.join(SCENES)}")
    for name in names:
        for size in args.size or [(80, 24), (200, 60)]:
            for theme in args.theme or ["dark"]:
                draw(args.out.absolute() / f"{name}_{size[0]}x{size[1]}_{theme}.svg", name, size, theme)


if __name__ == "__main__":
    main()
