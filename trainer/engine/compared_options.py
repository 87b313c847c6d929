"""Options, versions and code of a rank by name, which must be equal on all ranks."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainer.contract.options import Training
from trainer.contract.schema import describe, text_of
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


MAX_FILES = 256
"""Maximum number of files: reading that many takes a tenth of a second, and a task has a handful."""


def task_sources(module: str, file: Path, *, excluded: Path) -> dict[str, Path]:
    """Return the source files of a user's task: its own, and those that it imports from its own folder.

    They are found by parsing imports, not in ``sys.modules``: a helper that only one rank comes to import must be
    compared too. The keys are the paths relative to the folder from which the task is imported.
    """
    packages = module.count(".") + (file.name == "__init__.py")
    root = file.parents[packages] if packages < len(file.parents) else file.parent
    # In site-packages the neighbours of a module belong to other distributions.
    alone = packages == 0 and any(str(root) == path for path in sysconfig.get_paths().values())
    sources: dict[str, Path] = {}
    queue = deque([file, *(_files(module.split("."), root) if packages else ())])
    while queue and len(sources) < MAX_FILES:
        path = queue.popleft()
        if (name := str(path.relative_to(root))) in sources:
            continue
        sources[name] = path
        if alone:
            break
        within = root if packages == 0 else root / module.partition(".")[0]
        imported = _imported(path, root)
        queue += sorted(each for each in imported if each.is_relative_to(within) and not each.is_relative_to(excluded))
    return sources


def _imported(path: Path, root: Path) -> set[Path]:
    """Return the files below ``root`` that a file's import statements name, wherever they stand in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    return {file for parts in _names(tree, path, root) for file in _files(parts, root)}


def _names(tree: ast.AST, path: Path, root: Path) -> Iterator[list[str]]:
    """Yield the parts of each imported name, absolute from ``root``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[min(node.level, len(path.parents)) - 1] if node.level else root
            if not base.is_relative_to(root):
                continue
            before = [*base.relative_to(root).parts, *(node.module.split(".") if node.module else [])]
            for alias in node.names:  # each may be a module or a name in one
                yield [*before, alias.name]


def _files(parts: list[str], root: Path) -> Iterator[Path]:
    """Yield the files that importing a name runs: ``__init__.py`` of each package on the way, and the module."""
    for count in range(1, len(parts) + 1):
        module = root.joinpath(*parts[:count])
        for file in (module.with_name(module.name + ".py"), module / "__init__.py"):
            if os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises for a name that is too long
                yield file
