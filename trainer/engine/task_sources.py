"""Source files of a user's task: its own, and those that it imports from its own folder.

Found by parsing imports, not in ``sys.modules``: a helper that only one rank comes to import must be compared too.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 256
"""Maximum number of files: reading that many takes a tenth of a second, and a task has a handful."""


def task_sources(module: str, file: Path, *, excluded: Path) -> dict[str, Path]:
    """Return the files by their path relative to the folder from which the task is imported, the task's own first."""
    packages = module.count(".") + (file.name == "__init__.py")
    root = file.parents[packages] if packages < len(file.parents) else file.parent
    # In site-packages the neighbours of a module belong to other distributions.
    alone = packages == 0 and any(str(root) == path for path in sysconfig.get_paths().values())
    found: dict[str, Path] = {}
    queue = deque([file, *(_files(module.split("."), root) if packages else ())])
    while queue and len(found) < MAX_FILES:
        path = queue.popleft()
        if (name := str(path.relative_to(root))) in found:
            continue
        found[name] = path
        if alone:
            break
        within = root if packages == 0 else root / module.partition(".")[0]
        imported = _imported(path, root)
        queue += sorted(each for each in imported if each.is_relative_to(within) and not each.is_relative_to(excluded))
    return found


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
        place = root.joinpath(*parts[:count])
        for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises for a name that is too long
                yield file
