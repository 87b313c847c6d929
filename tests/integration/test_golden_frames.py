"""The console as rows of text, compared with files; ``UPDATE_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import SCENES, fixed_place, playing
from screen_frames import played, rows

GOLDEN = Path(__file__).parents[1] / "golden" / "screens"
LARGE = ("run_straggler", "run_failed", "rank", "compare", "cluster_hosts", "launch")
"""What differs most between a small terminal and a large one."""


@pytest.mark.parametrize(
    ("name", "size"), [*((name, (80, 24)) for name in SCENES), *((name, (200, 60)) for name in LARGE)]
)
@played
async def test_a_scene_matches_its_golden_frame(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    scene = SCENES[name]
    with fixed_place(tmp_path, scene.theme):
        async with playing(scene, size) as app:
            found = "".join(f"{row.rstrip()}\n" for row in rows(app))
    path = GOLDEN / f"{name}_{size[0]}x{size[1]}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_no_frame_is_left_that_nothing_compares() -> None:
    names = {f"{name}_80x24.txt" for name in SCENES} | {f"{name}_200x60.txt" for name in LARGE}
    assert {path.name for path in GOLDEN.iterdir()} == names


def test_the_command_for_pictures_draws_a_scene(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tests/support/draw_pictures.py",
        "history_empty",
        "--size",
        "80x24",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=GOLDEN.parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "history_empty_80x24_dark.svg")]
    picture = (tmp_path / "history_empty_80x24_dark.svg").read_text()
    assert picture.startswith("<svg")
    assert "trains&#160;the&#160;demo" in picture
