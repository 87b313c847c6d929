"""Layout of a run's archive: the files and folders of a run directory that it may contain."""

from __future__ import annotations

import re

TOP_FILES = ("recipe.toml", "plan.json", "status.json", "slurm.json", "notes.json")
FOLDERS = ("events", "logs", "nodes", "digest")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII)
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,90}", re.ASCII)
"""Name of the archive's only folder; the USTAR format has 155 bytes for folders."""
MAX_FILES = 1 << 18
"""Maximum number of files: the largest run has four per rank."""


def is_file_of_run(path: str) -> bool:
    """Whether a path below the run directory is one that an archive may hold."""
    folder, _, name = path.rpartition("/")
    if not folder:
        return name in TOP_FILES
    return folder in FOLDERS and FILE_NAME.fullmatch(name) is not None
