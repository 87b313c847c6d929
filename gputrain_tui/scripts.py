"""``watch`` of ``trainer.watch``, under a name that a ``trainer`` in a script's folder does not hide.

What it calls is loaded when a script calls it: no command imports this module, and it imports no torch.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "trainer"


def watch(model: Any, optimizer: Any, **settings: Any) -> Any:
    """Record the training of ``model`` until the ``with`` block ends: see ``trainer.watch.watch``."""
    with _own_imports():
        return import_module("trainer.watch").watch(model, optimizer, **settings)


def _own_imports() -> AbstractContextManager[None]:
    """Return a context in which imports find our ``trainer``, whichever one the script has imported or would find."""
    # Kept by the launcher of a script, which has hidden our modules from it, or by an earlier call.
    own_package: Any = sys.modules.get("gputrain_own_package")
    if own_package is None:
        loaded = sys.modules.get("trainer")
        spec = find_spec("trainer") if loaded is None else None
        if (spec.origin if spec is not None else getattr(loaded, "__file__", None)) == str(PACKAGE / "__init__.py"):
            return nullcontext()
        by_path = spec_from_file_location("started_process", PACKAGE / "telemetry/instrument/started_process.py")
        assert by_path is not None
        assert by_path.loader is not None
        started_process = module_from_spec(by_path)
        by_path.loader.exec_module(started_process)
        others = [folder for folder in sys.path if PathFinder.find_spec("trainer", [folder or "."]) is None]
        own_package = started_process.load_own_package([str(PACKAGE.parent), *others])
    context: AbstractContextManager[None] = own_package.own_package()
    return context
