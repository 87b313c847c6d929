"""Packs modules into one program for a remote ``python3``: nothing has to be installed on the host."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gputrain_tui
import trainer

MODULES = (
    "trainer.host.proc_files",
    "trainer.host.addresses",
    "trainer.host.boot",
    "trainer.host.cores",
    "trainer.host.gpu_claims",
    "trainer.host.memory",
    "trainer.host.nvml",
    "trainer.host.processes",
    "gputrain_tui.hosts.inventory",
)
"""Modules of the inventory, in import order; they use the standard library only."""

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


def inventory_program() -> bytes:
    """Return the source of the inventory's program; its argument is the mark to print before the JSON."""
    return packed_program(MODULES)


@cache
def packed_program(modules: tuple[str, ...]) -> bytes:
    """Return the source of a program that holds modules, given in import order, and runs ``main`` of the last one."""
    sources = []
    for name in modules:
        package, _, rest = name.partition(".")
        folder = Path(str((trainer if package == trainer.__name__ else gputrain_tui).__file__)).parent
        text = folder.joinpath(*rest.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        sources.append((name, text))
    return BOOTSTRAP.format(sources=sources).encode()
