from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from gputrain_tui.hosts import agent_connection, host_dialog, inventory_program
from gputrain_tui.lifecycle import push


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


@pytest.mark.parametrize(
    "modules", [inventory_program.MODULES, agent_connection.MODULES, push.MODULES, host_dialog.MODULES], ids=len
)
def test_a_program_for_other_hosts_has_its_imports_in_order(modules: tuple[str, ...]) -> None:
    for index, module in enumerate(modules):
        for needed in imports_of(module):
            first = needed.partition(".")[0]
            assert first in sys.stdlib_module_names or needed in modules[:index], f"{module} imports {needed}"
