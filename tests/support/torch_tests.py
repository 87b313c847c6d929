"""Prints the files of the default suite that import torch, or the module given, or a file of the tests that does.

``.ci/run`` and ``tests/README.md`` give them to pytest under another version of torch.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = ("unit", "integration")


@cache
def imports(file: Path, wanted: str) -> bool:
    """Return whether a file of the tests imports a module or one below it, by itself or by another of them."""
    modules = re.findall(r"^ *(?:from|import) ([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if any(f"{module}.".startswith(f"{wanted}.") for module in modules):
        return True
    helpers = (folder / f"{module}.py" for module in modules for folder in (file.parent, TESTS / "support"))
    return any(helper.is_file() and helper != file and imports(helper, wanted) for helper in helpers)


if __name__ == "__main__":
    module = sys.argv[1] if len(sys.argv) > 1 else "torch"
    found = [file for folder in FOLDERS for file in (TESTS / folder).rglob("test_*.py") if imports(file, module)]
    print(*sorted(str(file.relative_to(TESTS.parent)) for file in found))
