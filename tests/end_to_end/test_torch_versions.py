"""Versions of torch as other builds spell them: those of macOS, Conda and own builds have no ``+cpu`` or ``+cu130``."""

from __future__ import annotations

import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest
import torch
from trained import ENVIRON, TASK
from waiting import LIMIT_S

from trainer.distributed.encoding import decode, encode

# Imported by every Python process whose PYTHONPATH has its folder, before any other module.
SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

class OtherVersion:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.version":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            module.__version__ = {version!r}
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, OtherVersion())
"""


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [pytest.param("2.13.0", marks=pytest.mark.slow), "2.13.0a0+git1f2e3d4"])
def test_ranks_train_together_whatever_the_version_of_torch_ends_with(
    tmp_path: Path, version: str, start_method: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(version=version))
    environ = ENVIRON | {"PYTHONPATH": str(tmp_path)}
    seen = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, env=environ
    )
    assert seen.stdout.strip() == version
    words = ["--task", TASK, "--cpu", "--distributed-world-size", "2", "--max-updates", "3", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words, "--start-method", start_method],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert "finished: max_updates 3 reached" in done.stdout


def test_ranks_exchange_text_and_numbers_of_derived_types_as_plain_ones() -> None:
    class Number(float):
        """As numpy's scalars are."""

    kind = IntEnum("kind", ["SMALL"])
    sent = {"version": torch.__version__, "size": torch.Size([2, 3]), "mean": Number(0.5), "kind": kind.SMALL}
    received = decode(encode(sent))
    assert received == {"version": str(torch.__version__), "size": (2, 3), "mean": 0.5, "kind": 1}
    assert [type(value) for value in received.values()] == [str, tuple, float, int]
