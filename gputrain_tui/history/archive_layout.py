"""What an archive of a run may hold: the files of a run directory that say what happened, and nothing that acts."""

from __future__ import annotations

import re

TOP_FILES = ("recipe.toml", "plan.json", "status.json", "slurm.json", "notes.json")
FOLDERS = ("events", "logs", "nodes", "digest")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII)
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,90}", re.ASCII)
"""Of the folder in it; the format has 155 bytes for folders."""
MAX_FILES = 1 << 18
"""Of the largest run: four for each rank."""


def is_file_of_run(path: str) -> bool:
    """Whether a path below the run directory is one that an archive may hold."""
    folder, _, name = path.rpartition("/")
    if not folder:
        return name in TOP_FILES
    return folder in FOLDERS and FILE_NAME.fullmatch(name) is not None
