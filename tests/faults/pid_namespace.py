"""Runs a program of a test where no signal can reach a process of this machine: in a PID namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240.0
"""No program takes longer; what takes so long hangs."""


def run_in_namespace(program: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program there; a shell is its first process. Skip where there can be no namespace."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    enter = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([*enter, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this kernel or container allows no PID namespaces: {tried.stderr.strip()}")
    inside = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(program), *map(str, words)]
    return subprocess.run([*enter, *inside], capture_output=True, text=True, timeout=LIMIT_S)
