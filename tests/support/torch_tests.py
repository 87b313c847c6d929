"""Prints the files of the default suite that touch torch: those that import it, or a helper beside them that does.

``.ci/run`` and ``tests/README.md`` give them to pytest under another version of torch.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = ("unit", "integration")


@cache
def imports_torch(file: Path) -> bool:
    """Return whether a file of the tests imports torch, by itself or by another file of the tests."""
    modules = re.findall(r"^ *(?:from|import) ([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if any(module.partition(".")[0] == "torch" for module in modules):
        return True
    helpers = (folder / f"{module}.py" for module in modules for folder in (file.parent, TESTS / "support"))
    return any(helper.is_file() and helper != file and imports_torch(helper) for helper in helpers)


if __name__ == "__main__":
    found = [file for folder in FOLDERS for file in (TESTS / folder).rglob("test_*.py") if imports_torch(file)]
    print(*sorted(str(file.relative_to(TESTS.parent)) for file in found))
