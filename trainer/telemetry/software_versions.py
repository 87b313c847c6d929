"""Versions of the software that a rank runs, as it has loaded it: what an install or a container may change unseen."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.contract.record import RankState
from trainer.host.nvml import load_driver

PACKAGE = Path(__file__).parents[1]


@cache
def software_versions() -> dict[str, str]:
    """Return the versions by name: ``python``, ``torch``, ``gputrain`` and the digest of its ``trainer_code``.

    Where torch is built for GPUs also ``cuda`` or ``rocm``, ``nccl`` and the ``driver``; what is not known is left out.
    gloo has no version of its own: it is a part of torch.
    """
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {"cuda": torch.version.cuda or "", "rocm": torch.version.hip or "", "nccl": _nccl()}
    if torch.version.cuda:
        versions["driver"] = _driver()
    with suppress(importlib.metadata.PackageNotFoundError):  # a folder that was copied to the host
        versions["gputrain"] = importlib.metadata.version("gputrain")
    versions["trainer_code"] = code_digest(*sorted(PACKAGE.rglob("*.py")))
    return {name: version for name, version in versions.items() if version}


def versions_event(rank: int) -> RankState:
    """Return the event with the versions of a script's rank: torch is loaded only after it has begun."""
    return RankState(time=time.time(), rank=rank, state="training", versions=software_versions())


@cache
def code_digest(*files: Path) -> str:
    """Return a digest of the names and contents of files."""
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _driver() -> str:
    nvml = load_driver()
    if nvml is None or nvml.start():
        return ""
    version = nvml.text("nvmlSystemGetDriverVersion") or ""
    nvml.stop()
    return version
