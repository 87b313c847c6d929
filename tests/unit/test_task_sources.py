"""Which source files of a user's task are compared between ranks."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from trainer.engine.compared_options import MAX_FILES, task_sources

FILES = {
    "task.py": "import torch, helper, known.part\nfrom pkg.inner import deep\nfrom trainer.tasks.task import Task\n",
    "helper.py": "def later():\n    if True:\n        import much_later\n    from task import nothing\n",
    "much_later.py": "from . import not_here\nfrom %s import x" % ("a" * 300),
    "not_imported.py": "",
    "torn.py": "def (",
    "pkg/__init__.py": "",
    "pkg/inner/__init__.py": "from .beside import value\n",
    "pkg/inner/beside.py": "from ..other import *\nimport helper\n",
    "pkg/inner/deep.py": "from .. import other, torn\n",
    "pkg/other.py": "import torn\n",
    "known/part.py": "",
}


@pytest.mark.parametrize(
    ("module", "file", "found"),
    [
        (
            "task_file_as_it_was_loaded",
            "task.py",
            "task.py helper.py pkg/__init__.py pkg/inner/__init__.py pkg/inner/deep.py much_later.py "
            "pkg/inner/beside.py pkg/other.py torn.py",
        ),
        ("much_later", "much_later.py", "much_later.py"),
        # Of a module in a package only those of that package: the folder above may hold anything.
        (
            "pkg.inner.deep",
            "pkg/inner/deep.py",
            "pkg/inner/deep.py pkg/__init__.py pkg/inner/__init__.py pkg/inner/beside.py pkg/other.py",
        ),
        (
            "pkg.inner",
            "pkg/inner/__init__.py",
            "pkg/inner/__init__.py pkg/inner/beside.py pkg/__init__.py pkg/other.py",
        ),
    ],
)
def test_the_files_that_a_task_imports_from_its_own_folder_are_found_without_running_them(
    tmp_path: Path, module: str, file: str, found: str
) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sources = task_sources(module, tmp_path / file, excluded=tmp_path / "known")
    assert next(iter(sources)) == file
    assert set(sources) == set(found.split())
    assert all(path == tmp_path / name for name, path in sources.items())


def test_the_neighbours_of_an_installed_module_are_not_its_own() -> None:
    file = Path(sysconfig.get_path("stdlib")) / "calendar.py"
    assert list(task_sources("calendar", file, excluded=Path("/nowhere"))) == ["calendar.py"]


def test_no_more_files_are_followed_than_a_task_has(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 9):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}\n")
    assert len(task_sources("m0", tmp_path / "m0.py", excluded=Path("/nowhere"))) == MAX_FILES
