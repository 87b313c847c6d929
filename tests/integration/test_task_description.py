from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recipe_texts import recipe_of, refusal

from gputrain_tui.recipe.task_description import describe_task
from trainer.contract.errors import RequestError

ROOT = Path(__file__).parents[2]


USER_TASK = """
import msgspec
from typing import Annotated
from trainer.tasks.task import Task

class Options(msgspec.Struct, kw_only=True):
    width: Annotated[int, msgspec.Meta(ge=1, description="hidden units")] = 8
    path: str

class Mine(Task):
    Options = Options
"""


def test_the_schema_of_a_users_task_is_cached_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    file = tmp_path / "mine.py"
    file.write_text(USER_TASK)
    text = f'[train]\ntask = "{file}:Mine"\n[task]\npath = "p"\nwidth = 3\n'
    assert recipe_of(text).task_options == {"path": "p", "width": 3}
    kept = list((tmp_path / "home" / "cache" / "tasks").glob("*.json"))
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    assert "r.toml:5: task.wdth is not known; did you mean 'width'?" in refusal(text.replace("width", "wdth"))
    assert kept[0].stat().st_mtime_ns == before
    file.write_text(USER_TASK.replace("width", "breadth"))
    assert recipe_of(text.replace("width", "breadth")).task_options["breadth"] == 3


def test_the_schema_of_a_users_task_follows_the_files_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    options = tmp_path / "mine_options.py"
    options.write_text("import msgspec\n\nclass Options(msgspec.Struct, kw_only=True):\n    width: int = 8\n")
    task = tmp_path / "mine.py"
    task.write_text(
        "from mine_options import Options\nfrom trainer.tasks.task import Task\n\n"
        "class Mine(Task):\n    Options = Options\n"
    )
    text = f'[train]\ntask = "{task}:Mine"\n[task]\n'
    assert "r.toml:4: task.depth is not known" in refusal(text + "depth = 3\n")
    options.write_text(options.read_text() + "    depth: int = 2\n")
    assert recipe_of(text + "depth = 3\n").task_options == {"depth": 3}
    options.unlink()
    plain = refusal(text + "depth = 3\n")
    assert plain.endswith("No module named 'mine_options'")
    for env in ("[cluster.env]", "[[cluster.nodes]]\ncpu_ranks = 1\n[cluster.nodes.env]"):
        assert refusal(f'{text}{env}\nPYTHONPATH = "/lib"\n').endswith(
            "; PYTHONPATH in a table env is for the ranks: export it where gputrain runs, too"
        )


def test_a_users_task_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    with pytest.raises(RequestError, match="does not exist"):
        describe_task(str(tmp_path / "none.py:Mine"))


def test_reading_a_recipe_imports_neither_torch_nor_a_toml_writer() -> None:
    code = (
        "import sys; from gputrain_tui.recipe.build import load; load(sys.argv[1]); "
        "print([name for name in ('torch', 'textual', 'tomlkit', 'psutil') if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, str(ROOT / "recipes" / "four_nodes.toml")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "[]"
