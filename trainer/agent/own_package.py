"""Hiding of this package from a script whose folder has a module of the same name, ``trainer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = __name__.partition(".")[0]

_hidden: dict[str, ModuleType] = {}
"""The modules of this package while they are hidden; else empty."""


def hide_from_script(folder: Path) -> None:
    """Remove this package from ``sys.modules`` if the folder has another module of its name."""
    spec = PathFinder.find_spec(PACKAGE, [str(folder)])
    own_spec = sys.modules[PACKAGE].__spec__
    if spec is not None and spec.origin is not None and own_spec is not None and spec.origin != own_spec.origin:
        _hidden.update(_pop_modules())


@contextmanager
def own_package() -> Iterator[None]:
    """Make imports in the body find this package, even if it is hidden from the script."""
    if not _hidden:
        yield
        return
    script_modules = _pop_modules()
    sys.modules.update(_hidden)
    try:
        yield
    finally:
        _hidden.update(_pop_modules())
        sys.modules.update(script_modules)


def restore() -> None:
    """Make imports find this package again, for good."""
    if _hidden:
        _pop_modules()
        sys.modules.update(_hidden)
        _hidden.clear()


def _pop_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]
    return {name: sys.modules.pop(name) for name in names}
