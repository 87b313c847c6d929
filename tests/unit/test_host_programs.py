from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

from gputrain_tui.hosts.host_channel import MODULES
from gputrain_tui.hosts.host_program import FUNCTIONS


def imports_of(module: str) -> set[str]:
    """Return what a module imports when it is loaded, and what of our own packages it imports later."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    branches = [node for node in tree.body if not isinstance(node, ast.If)]  # under an if stands what types need
    loaded = {name for node in branches for name in _names(node)}
    later = {name for branch in branches for node in ast.walk(branch) for name in _names(node)}
    return loaded | {name for name in later if name.startswith(("trainer.", "gputrain_tui."))}


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {name.name for name in node.names}
    return {node.module or ""} - {"__future__"} if isinstance(node, ast.ImportFrom) else set()


def test_the_program_for_other_hosts_holds_all_that_it_imports_and_nothing_else() -> None:
    modules = {f"{package}.{name}" for package, names in MODULES.items() for name in names.split()}
    needed = {"gputrain_tui.hosts.host_program", *(f"gputrain_tui.hosts.{module}" for module in FUNCTIONS.values())}
    for module in modules:
        imported = imports_of(module)
        needed |= {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert needed == modules
