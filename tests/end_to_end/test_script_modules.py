"""Scripts that are modules, and launchers that pass the local rank as an argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODULE = """\
import json, multiprocessing, os, sys
from pathlib import Path
from . import beside
def child(queue):
    queue.put(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    # multiprocessing does not import the main module of a package again.
    whole = (queue.put, ("",)) if __spec__.name.endswith("__main__") else (child, (queue,))
    process = context.Process(target=whole[0], args=whole[1])
    process.start()
    seen = {
        "argv": sys.argv, "path": sys.path[0], "package": __package__, "spec": __spec__.name, "file": __file__,
        "beside": beside.VALUE, "child": queue.get(timeout=300), "doc": __doc__, "cached": __cached__,
    }
    process.join()
    name = os.environ.get("RANK", "0") + ".json"
    Path(os.environ["SEEN"], name).write_text(json.dumps(seen))
"""


def write_package(folder: Path) -> None:
    inner = folder / "pkg" / "inner"
    inner.mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (inner / "beside.py").write_text("VALUE = 5\n")
    (inner / "train.py").write_text(MODULE)
    (inner / "__main__.py").write_text(MODULE)


def seen_by(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Return what each rank of a command has seen, by the name of its file."""
    seen = folder / name
    seen.mkdir()
    environment = {
        **os.environ,
        "GPUTRAIN_HOME": str(folder / "home"),
        "SEEN": str(seen),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: json.loads(path.read_text()) for path in sorted(seen.glob("*.json"))}


GPUTRAIN = (sys.executable, "-P", "-m", "gputrain_tui")


@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        pytest.param(["torch.distributed.run", "--nproc-per-node", "2"], "pkg.inner.train", id="torchrun"),
        pytest.param(["torch.distributed.launch", "--nproc-per-node", "2"], "pkg.inner", id="launch a package"),
        pytest.param(
            ["torch.distributed.launch", "--nproc-per-node", "2", "--use-env"],
            "pkg.inner.train",
            id="launch --use-env",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_module_sees_what_it_sees_under_torch_s_launcher(tmp_path: Path, launcher: list[str], module: str) -> None:
    write_package(tmp_path)
    command = ["-m", *launcher, "-m", module, "--", "--depth=24"]
    theirs = seen_by(tmp_path, "theirs", sys.executable, *command)
    subprocess.run([*GPUTRAIN, "init", "-o", "r.toml", "--", "python", *command], cwd=tmp_path, check=True)
    ours = seen_by(tmp_path, "ours", *GPUTRAIN, "run", "r.toml")
    assert ours == theirs
    assert len(ours) == 2


def test_a_module_that_does_not_exist_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[cluster.nodes]]\ncpu_ranks = 1\n[train]\nscript = "no.such"\nmodule = true\n')
    environment = {**os.environ, "GPUTRAIN_HOME": str(tmp_path / "home")}
    words = [*GPUTRAIN, "run", "r.toml"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "python -m no.such: " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
