"""Commands, one module each, with ``add_arguments(parser)`` and ``run(args) -> int``.

A command prints data on stdout and messages on stderr, raises ``RequestError`` for wrong requests, and imports neither
torch nor, except for the console, textual.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
