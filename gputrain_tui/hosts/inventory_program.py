"""Packs the inventory as one program for a remote interpreter, so that nothing is installed there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gputrain_tui
import trainer

MODULES = (
    "trainer.host.addresses",
    "trainer.host.boot",
    "trainer.host.cores",
    "trainer.host.memory",
    "trainer.host.nvml",
    "trainer.host.processes",
    "gputrain_tui.hosts.inventory",
)
"""In the order in which they need each other; standard library only."""

BOOTSTRAP = """\
import sys, types
if sys.version_info < (3, 10):
    sys.exit("python3 is %d.%d" % sys.version_info[:2])
for name, text in {sources!r}:
    for end in [i for i, c in enumerate(name) if c == "."]:
        sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
module.main(sys.argv[1:])
"""


@cache
def inventory_program() -> bytes:
    """Return what ``python3 -`` is to read; its words are what it prints before the JSON, on the same line."""
    sources = []
    for name in MODULES:
        package, _, rest = name.partition(".")
        folder = Path(str((trainer if package == trainer.__name__ else gputrain_tui).__file__)).parent
        text = folder.joinpath(*rest.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        sources.append((name, text))
    return BOOTSTRAP.format(sources=sources).encode()
