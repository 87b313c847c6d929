"""Callback after a module's import, without importing it; torch-free."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call a function as soon as the module's code has run; at once where it has been imported already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finder of one module by the other finders, which removes itself at the first successful import."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _Loader(Loader):
    """Loader that delegates to another one, sets that as the module's loader, and calls back after the import."""

    def __init__(self, loader: Any, imported: Callable[[], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported()
