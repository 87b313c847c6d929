"""The inventory as one program for a bare interpreter: its modules travel in it, so nothing is installed over there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gputrain_tui

MODULES = ("nvml", "inventory")
"""In the order in which they need each other; standard library only."""

BOOTSTRAP = """\
import sys, types
if sys.version_info < (3, 10):
    sys.exit("python3 is %d.%d" % sys.version_info[:2])
sys.modules["gputrain_tui"] = types.ModuleType("gputrain_tui")
for name, text in {sources!r}:
    module = sys.modules["gputrain_tui." + name] = types.ModuleType("gputrain_tui." + name)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
module.main(sys.argv[1:])
"""


@cache
def inventory_program() -> bytes:
    """Return what ``python3 -`` is to read; its words are what it prints before the JSON, on the same line."""
    folder = Path(gputrain_tui.__file__).parent
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    return BOOTSTRAP.format(sources=sources).encode()
