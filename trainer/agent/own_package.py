"""Import path of a script's rank: as in a new interpreter for the script, and these packages' own path for their code.

A script may have modules with names of loaded ones, such as ``trainer`` or ``queue``. The loaded ones are hidden from
the script, and these packages' code imports in ``own_package``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, FrozenImporter
from types import ModuleType

from trainer.host.import_path import origin_in

SHARED = ("__main__", "__mp_main__", "encodings", "sitecustomize", "usercustomize", "torch")
"""Modules that are never hidden: those that a new interpreter has loaded before it runs a script, besides the built-in
and frozen ones; and torch, as the script's own is the one to be measured."""

KEPT = "gputrain_own_package"
"""Name under which this module is found while its own name is hidden from the script."""

_folders: list[str] = []
"""Folders of the script at the front of its path; empty while these packages' own path is in force for good."""
_own_path: list[str] = []
_hidden: dict[str, ModuleType] = {}
"""Modules hidden from the script."""


def hide_from_script(folders: Sequence[str]) -> None:
    """Put a script's folders at the front of the path, and hide the loaded modules of which they have others."""
    sys.modules[KEPT] = sys.modules[__name__]
    _folders[:] = folders
    _own_path[:] = sys.path
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    _hidden.update(_pop_modules())


def own_path() -> list[str]:
    """Return the import path of these packages."""
    return list(_own_path)


def enter(path: Sequence[str], loaded: Mapping[str, ModuleType]) -> None:
    """Begin to keep both apart in a process in which the script's own modules are loaded and these packages are not.

    Args:
        path: import path of these packages; what the process has besides is the script's.
        loaded: modules of these packages that are loaded and hidden.
    """
    sys.modules[KEPT] = loaded[__name__]
    _folders[:] = [folder for folder in sys.path if folder not in path]
    _own_path[:] = path
    _hidden.update(loaded)


@contextmanager
def own_package() -> Iterator[None]:
    """Make imports in the body find what they find without the script's folders."""
    if not _folders:
        yield
        return
    script_path, script_modules = list(sys.path), _pop_modules()
    sys.path[:] = _own_path
    sys.modules.update(_hidden)
    try:
        yield
    finally:
        _hidden.update(_pop_modules())
        sys.path[:] = script_path
        sys.modules.update(script_modules)


def restore() -> None:
    """Make imports ignore the script's folders for good."""
    if _folders:
        _pop_modules()
        sys.path[:] = _own_path
        sys.modules.update(_hidden)
        _hidden.clear()
        _folders.clear()


def _pop_modules() -> dict[str, ModuleType]:
    """Remove and return the loaded modules, with their submodules, of whose names the script has others."""
    others = {name for name in {name.partition(".")[0] for name in sys.modules} if _has_another(name)}
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in others}


def _has_another(name: str) -> bool:
    """Whether the script's import of a top-level module finds another file than an import by these packages."""
    theirs = origin_in(_folders, name)
    if theirs is None or name in SHARED or BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
        return False
    return theirs != origin_in(_own_path, name)
