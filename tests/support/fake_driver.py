"""Build a fake NVML library with two GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def fake_driver(folder: Path) -> Path:
    """Compile libnvidia-ml.so.1 into a folder and return the folder, for LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of the NVIDIA driver")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder
