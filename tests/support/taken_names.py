"""A folder with a file for each module name that our processes may import."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

NAMES = {name for name in {*sys.stdlib_module_names, *packages_distributions(), "trainer"} if name.isidentifier()}
"""Top-level names of the standard library, of these packages, and of everything that is installed beside them."""
TRAP = """\
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
raise ImportError(__file__ + " was imported")
"""


def importable() -> set[str]:
    """Return the names that have a module on this platform: Python's own code tries to import the others too."""
    return {name for name in NAMES if name in sys.builtin_module_names or PathFinder.find_spec(name) is not None}


class TakenNames:
    """Files in a folder that record their execution and then fail, but for ``trainer``, which is a package of them."""

    def __init__(self, folder: Path, marker: Path, names: Iterable[str] = NAMES) -> None:
        self._marker = marker
        text = TRAP.format(marker=str(marker))
        for name in names:
            if name == "trainer":
                (folder / name).mkdir()
            files = ("__init__", "__main__", "host", "watch") if name == "trainer" else ("",)
            for file in files:
                (folder / name / file if file else folder / name).with_suffix(".py").write_text(text)

    def executed(self) -> list[str]:
        """Return the names of the modules that were executed."""
        return sorted(set(self._marker.read_text().split())) if self._marker.exists() else []
