"""A small file system of its own, in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """Make the folder and mount a file system of this size there; skip the test without the right to."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs the superuser")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
