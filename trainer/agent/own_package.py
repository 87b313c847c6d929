"""Step aside where a script's folder has a module of this package's name, which the script means by it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = __name__.partition(".")[0]

_hidden: dict[str, ModuleType] = {}
"""The modules of this package, while an import of them would find the script's; else empty."""


def hide_from_script(folder: Path) -> None:
    """Take this package out of the imported modules, if the folder has a module of its name."""
    spec = PathFinder.find_spec(PACKAGE, [str(folder)])
    ours = sys.modules[PACKAGE].__spec__
    if spec is not None and spec.origin is not None and ours is not None and spec.origin != ours.origin:
        _hidden.update(_take_out())


@contextmanager
def own_package() -> Iterator[None]:
    """Have imports find this package, as they do where nothing is hidden."""
    if not _hidden:
        yield
        return
    theirs = _take_out()
    sys.modules.update(_hidden)
    try:
        yield
    finally:
        _hidden.update(_take_out())
        sys.modules.update(theirs)


def show_again() -> None:
    """Have imports find this package from here on."""
    if _hidden:
        _take_out()
        sys.modules.update(_hidden)
        _hidden.clear()


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]
    return {name: sys.modules.pop(name) for name in names}
