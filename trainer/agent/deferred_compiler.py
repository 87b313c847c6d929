"""torch's compiler, imported only where something is compiled: it takes as long to import as the rest of torch.

torch imports ``torch._dynamo`` when the first optimizer is made: to keep a compiler that may be at work out of some
functions. A stand-in answers such questions as the compiler does where nothing is compiled. Whatever else is asked of
it, or set in it, imports the compiler in its place. Ranks have it from their start; of a script, those that are
measured, once the script has imported torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
KEPT = "__dynamo_disable"
"""Attribute in which torch keeps, for a function, what ``disable`` has returned for it."""


def defer_compiler() -> None:
    """Have ``import torch._dynamo`` give the stand-in, unless the compiler has been imported already."""
    if COMPILER not in sys.modules:
        compiler = sys.modules[COMPILER] = vars(torch)["_dynamo"] = _Compiler()
        sys.meta_path.insert(0, _Finder(compiler))


class _Compiler(ModuleType):
    """Stand-in of ``torch._dynamo`` until that is imported."""

    _lock: threading.Lock
    _left_alone: list[FunctionType]

    def __init__(self) -> None:
        super().__init__(COMPILER)
        utils = _Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        spec = importlib.util.find_spec(COMPILER)
        assert spec is not None
        vars(self).update(
            __spec__=spec,  # a module without it is an error for ``importlib.util.find_spec``
            __path__=spec.submodule_search_locations,
            _lock=threading.Lock(),
            _left_alone=[],
            # Asked by DDP's constructor; what it answers is the compiler's default.
            utils=utils,
            # Asked by it in torch 2.6.
            config=_Part(self, "config", _get_optimize_ddp_mode=utils.get_optimize_ddp_mode),
            # Cleared by a new process group.
            trace_rules=_Part(self, "trace_rules", clear_lru_cache=lambda: None),
        )

    @staticmethod
    def graph_break(*_: object) -> None:
        """Do nothing, as the compiler's function does where nothing is compiled; each optimizer's step calls it."""

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch unchanged; for any other, import the compiler to leave that uncompiled."""
        if sys._getframe(1).f_globals.get("__name__") != "torch._compile":
            return self.imported().disable(function, *args, **options)
        self._left_alone.append(function)
        return function

    def imported(self) -> Any:
        """Return the compiler, imported in place of this."""
        with self._lock:
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
                del vars(torch)["_dynamo"]
                # From here on these functions are to be kept from the compiler.
                for function in self._left_alone:
                    function.__dict__.pop(KEPT, None)
        return importlib.import_module(COMPILER)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by those who look through all modules
            raise AttributeError(name)
        return getattr(self.imported(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.imported(), name, value)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that imports the compiler before a module of it: that would be loaded twice, once by the compiler."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}.") or sys.modules.get(COMPILER) is not self._compiler:
            return None
        self._compiler.imported()
        module = sys.modules.get(name)
        if module is None:
            return None
        # The import system prefers the spec of a module that has appeared meanwhile. The compiler's settings refuse to
        # be given an attribute.
        spec = vars(module)["__spec__"] = ModuleSpec(name, _Loaded(module))
        return spec


class _Loaded(importlib.abc.Loader):
    """Loader of a module that is there already, and gets the spec again that it has had."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec


class _Part:
    """Stand-in of a module of the compiler."""

    def __init__(self, compiler: _Compiler, name: str, **known: Callable[[], object]) -> None:
        self.__dict__.update(known, _compiler=compiler, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(self._compiler.imported(), self._name), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(self._compiler.imported(), self._name), name, value)
