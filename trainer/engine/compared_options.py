"""Options, versions and code of a rank by name, which must be equal on all ranks."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainer.contract.options import Training
from trainer.contract.schema import describe, text_of
from trainer.engine.task_sources import task_sources
from trainer.tasks.task import Task

PACKAGE = Path(__file__).parents[1]


def training_request(options: Training) -> dict[str, str]:
    """Return the values that are compared before the process group exists: torch, this package and its options."""
    return {
        # Builds for CPUs and for GPUs of one version may train together. As plain text: torch gives a class of its own,
        # which cannot be encoded.
        "torch version": str(torch.__version__).partition("+")[0],
        "code of trainer": _code_of_package(),
        **_values(options),
    }


def task_request(name: str, kind: type[Task], options: Any) -> dict[str, str]:
    """Return digests of the code of the task of this name, and its options.

    They are compared after the rendezvous: a user's module may take long to import, or fail, while the other ranks
    would wait for one that never joins.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or Path(file).is_relative_to(PACKAGE):
        return _values(options)
    own, *helpers = task_sources(kind.__module__, Path(file), excluded=PACKAGE).items()
    code = {f"code of task {name}": _digest(own[1])}
    code |= {f"code of {path}, which task {name} imports": _digest(helper) for path, helper in helpers}
    return {**code, **_values(options)}


def _values(options: Any) -> dict[str, str]:
    return {
        option.flag: text_of(getattr(options, option.name)) for option in describe(type(options)) if not option.per_rank
    }


@cache
def _code_of_package() -> str:
    return _digest(*sorted(PACKAGE.rglob("*.py")))


def _digest(*files: Path) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
