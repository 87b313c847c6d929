from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import gallery
import pytest
from screen_frames import SIZES

from gputrain_tui import paths


@pytest.mark.slow
@pytest.mark.parametrize("theme", gallery.THEMES)
def test_every_scene_can_be_drawn_at_the_smallest_size_in_every_theme(theme: str, tmp_path: Path) -> None:
    # Runs that are kept from one scene to the next belong to one folder.
    for kept in (gallery.synthetic_run, gallery.many):
        kept.cache_clear()
    with gallery.calm(tmp_path, theme), mock.patch.object(paths, "runs_folder", return_value=Path("home/runs")):
        for name, scene in gallery.SCENES.items():
            picture = asyncio.run(gallery.picture(scene, SIZES["80x24"], theme))
            assert picture.startswith("<svg"), name
