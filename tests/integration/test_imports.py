"""Who may import whom, for every module found on disk: read from the source, and seen in fresh interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH_FREE = (
    "trainer",
    "trainer.__main__",
    "trainer.agent",
    "trainer.agent.launch",
    "trainer.agent.node_agent",
    "trainer.tasks",
    "trainer.tasks.registry",
)
"""What the node agent runs, besides the rooms without torch."""
TORCH_FREE_ROOMS = ("trainer.contract", "trainer.environments", "trainer.host")
OPEN_ROOMS = ("trainer.contract", "trainer.host")
"""What the console may read of the trainer."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_no_two_modules_have_the_same_stem() -> None:
    stems = [path.stem for package in ("trainer", "gputrain_tui") for _, path in modules(package)]
    assert {stem for stem in stems if stems.count(stem) > 1} == {"__init__", "__main__"}


def is_console(name: str) -> bool:
    return name.startswith("gputrain_tui.console")


def imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names of all that a module imports, also inside functions; ``from a import b`` gives ``a`` and ``a.b``."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(package: str, forbidden: Sequence[str], *, console: bool | None = None) -> list[str]:
    return [
        f"{name} imports {imported}"
        for name, path in modules(package)
        if console is None or is_console(name) is console
        for imported in imports(name, path)
        if imported.partition(".")[0] in forbidden
    ]


def brought_in(names: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    """Import modules one after the other in a fresh interpreter; print the first that imports a forbidden one."""
    program = """
import importlib, json, sys
names, forbidden = json.loads(sys.argv[1])
found = []
for name in names:
    importlib.import_module(name)
    new = [word for word in forbidden if word in sys.modules]
    found += [f"{name} brings {word}" for word in new]
    forbidden = [word for word in forbidden if word not in new]
print(json.dumps(found))
"""
    argument = json.dumps([list(names), list(forbidden)])
    done = subprocess.run([sys.executable, "-c", program, argument], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_the_console_never_names_torch_not_even_inside_a_function() -> None:
    assert breaches("gputrain_tui", ["torch", "numpy"]) == []


def test_headless_modules_never_name_textual() -> None:
    assert breaches("gputrain_tui", ["textual", "rich"], console=False) == []


def test_the_trainer_knows_nothing_of_the_console() -> None:
    assert breaches("trainer", ["gputrain_tui", "textual", "rich"]) == []


def test_the_console_uses_only_the_contract_and_the_host_of_the_trainer() -> None:
    everything = {name for name, _ in modules("trainer")}
    used = {
        f"{name} imports {imported}"
        for name, path in modules("gputrain_tui")
        for imported in imports(name, path)
        if imported in everything and imported != "trainer" and not imported.startswith(OPEN_ROOMS)
    }
    assert used == set()


def test_headless_modules_bring_neither_torch_nor_textual() -> None:
    names = [name for name, _ in modules("gputrain_tui") if not is_console(name)]
    assert brought_in(names, ["torch", "textual", "rich", "numpy"]) == []


def test_the_console_s_modules_bring_no_torch() -> None:
    names = [name for name, _ in modules("gputrain_tui") if is_console(name)]
    assert brought_in(names, ["torch", "numpy"]) == []


def test_modules_of_a_node_agent_import_no_torch() -> None:
    everything = {name for name, _ in modules("trainer")}
    assert (
        brought_in(
            [name for name in sorted(everything) if name in TORCH_FREE or name.startswith(TORCH_FREE_ROOMS)],
            ["torch", "numpy", "textual"],
        )
        == []
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_imports_no_command_and_no_parser(words: list[str]) -> None:
    program = (
        "import sys; from gputrain_tui.cli import main; main(sys.argv[1:]);"
        "print([name for name in sys.modules if name.startswith('gputrain_tui.commands.') or name == 'argparse'])"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["gputrain_tui.commands.run", "gputrain_tui.lifecycle.supervisor"])
def test_the_start_of_a_run_waits_for_no_cryptography(module: str) -> None:
    # hashlib and secrets load OpenSSL, for milliseconds that the first step would wait for.
    imported = f"import {module}, gputrain_tui.recipe.task_description, sys"
    code = f"{imported}; print({{'_hashlib', 'secrets'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"
