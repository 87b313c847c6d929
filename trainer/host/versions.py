"""Versions of what a training runs on, as the packages and the driver of this machine say; nothing is imported."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from functools import cache

from trainer.host.proc_files import PROC, read_text

PACKAGES = {
    "gputrain": ("gputrain",),
    "torch": ("torch",),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "lightning": ("lightning", "pytorch-lightning"),
}
"""Packages by what they are called here; of several the first one that is installed counts."""


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions by name, without those that are not known: torch may be installed by other means than pip."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer to import than to ask

    found = {"Python": platform.python_version()}
    for name, packages in PACKAGES.items():
        for package in packages:
            with suppress(PackageNotFoundError, KeyError, OSError):  # also metadata that are not whole
                found.setdefault(name, str(version(package)))
    driver = re.search(r"\d+\.\d+(\.\d+)?", read_text(PROC / "driver/nvidia/version"))
    return found | ({"NVIDIA driver": driver[0]} if driver else {})
