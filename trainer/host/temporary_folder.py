"""Temporary folder of a node's processes: of one run and node, with a short path, deleted at the node's end.

Sockets below TMPDIR have up to 68 bytes more (Ray), and the kernel's limit of their paths is 107. Standard library
only, since this file is sent to hosts with ``host_agent.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NAME = re.compile(r"gt[0-9a-f]{10}")
"""Names of these folders: six digits of a hash of run directory and node, four random ones."""
SHORT = Path("/tmp")
"""Folder for the sockets of ``multiprocessing`` where paths below the system's temporary folder are too long."""


def system_folder() -> Path:
    """Return the folder in which Python has temporary files, outside of the temporary folders of runs.

    Raises:
        FileNotFoundError: no folder can be written.
    """
    path = Path(tempfile.gettempdir())
    return next((folder.parent for folder in reversed([path, *path.parents]) if NAME.fullmatch(folder.name)), path)


def make_temporary_folder(run_dir: Path, node: int, within: Path) -> Path:
    """Make a temporary folder of a node, which only this user can read.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = within / f"{_prefix(run_dir, node)}{os.urandom(2).hex()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def temporary_folders(run_dir: Path, nodes: Iterable[int], within: Path | None = None) -> list[Path]:
    """Return the temporary folders of nodes of a run, by their names and owner; ``within`` replaces the system's."""
    prefixes = tuple(_prefix(run_dir, node) for node in nodes)
    folders = []
    for parent in {within or system_folder(), SHORT}:
        with suppress(OSError, ValueError):
            for name in os.listdir(parent):  # noqa: PTH208 - a folder of any size, of which few names fit
                if name.startswith(prefixes) and NAME.fullmatch(name):
                    status = (parent / name).lstat()
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                        folders.append(parent / name)
    return folders


def delete_temporary_folders(run_dir: Path, nodes: Iterable[int], within: Path | None = None) -> None:
    """Delete the temporary folders of nodes of a run; ``within`` replaces the system's."""
    for folder in temporary_folders(run_dir, nodes, within):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(run_dir: Path, node: int) -> str:
    named = os.fsencode(os.path.realpath(run_dir)) + b"\0%d" % node
    return f"gt{zlib.crc32(named) & 0xFFFFFF:06x}"
