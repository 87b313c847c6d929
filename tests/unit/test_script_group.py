"""Whether a script makes a process group, and what `init` writes about one that does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.launch_command import read_launch_command
from gputrain_tui.recipe.new_recipe import from_command
from gputrain_tui.recipe.script_text import makes_group
from gputrain_tui.recipe.shell_text import read_pasted_command

PLAIN = "import os, torch\nfrom torch import nn\nfrom torchvision import datasets\n"
CASES = [
    ({"train.py": PLAIN}, False),
    ({"train.py": f"{PLAIN}import torch.distributed as dist\ndist.init_process_group('gloo')\n"}, True),
    ({"train.py": f"{PLAIN}from utils import start\n", "utils.py": "def start(): init_process_group()\n"}, True),
    ({"train.py": f"{PLAIN}import utils\n", "utils.py": "import math\n"}, False),
    ({"train.py": f"{PLAIN}from . import utils\n", "utils.py": "import math\n"}, False),
    ({"train.py": "import a\n", "a.py": "import b\n", "b.py": "import a\n"}, False),
    ({"train.py": "from lib.dist import go\n", "lib/dist.py": "init_process_group()\n"}, True),
    ({"train.py": "from lib import go\n", "lib/__init__.py": "init_process_group()\n"}, True),
    ({"train.py": f"{PLAIN}from accelerate import Accelerator\n"}, None),
    ({"train.py": f"{PLAIN}import somebodys_trainer\n"}, None),
    ({"train.py": "def (\n"}, None),
    ({"train.py": "\0"}, None),
    ({}, None),
]


def read_from(files: dict[str, str], name: str) -> str:
    if name not in files:
        raise FileNotFoundError(2, "No such file or directory")
    return files[name]


@pytest.mark.parametrize(("files", "expected"), CASES)
def test_a_process_group_is_looked_for_in_the_script_and_the_modules_beside_it(
    files: dict[str, str], expected: bool | None
) -> None:
    assert makes_group("train.py", lambda name: read_from(files, name)) is expected


def not_asked(python: str | None, words: Sequence[str]) -> AccelerateLaunch:
    raise AssertionError(f"accelerate is asked about {words}")


def written(text: str, script: str) -> tuple[str, list[str]]:
    command = read_launch_command(
        read_pasted_command(text).argv,
        read_file=lambda name: read_from({"train.py": script}, name),
        ask_accelerate=not_asked,
    )
    return from_command(command, typed=text).text(file="r.toml"), command.notes


def test_more_ranks_are_not_suggested_for_a_script_without_a_process_group() -> None:
    recipe, notes = written("python train.py", PLAIN)
    assert not any("raise ranks" in note for note in notes)
    assert any(note.startswith("train.py makes no process group, so it is for one rank") for note in notes)
    assert "cpu_ranks = 2" not in recipe
    assert 'gpus = "all"' not in recipe


def test_a_trainer_of_the_folder_is_not_taken_for_ours() -> None:
    files = {"trainer.py": PLAIN, "trainer/__main__.py": PLAIN}
    command = read_launch_command(
        read_pasted_command("python -m trainer --task mnist --data d --max-epochs 1").argv,
        read_file=lambda name: read_from(files, name),
        ask_accelerate=not_asked,
    )
    assert not any("makes no process group" in note for note in command.notes)


def test_several_ranks_of_a_command_are_kept_with_a_word_on_the_missing_group() -> None:
    recipe, notes = written("torchrun --nproc-per-node 2 train.py", PLAIN)
    assert "ranks = 2" in recipe
    assert any("each would train a copy of its own" in note for note in notes)


def test_more_ranks_are_suggested_for_a_script_that_makes_a_process_group() -> None:
    recipe, notes = written("python train.py", f"{PLAIN}torch.distributed.init_process_group()\n")
    assert notes == ["python starts one process: raise ranks for more; each gets RANK, WORLD_SIZE and LOCAL_RANK"]
    assert "cpu_ranks = 2" in recipe
