"""Every option of torchrun's own parser is translated, named as not translated, or refused: none disappears."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest
from torch.distributed.launch import parse_args
from torch.distributed.run import get_args_parser

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.command_launchers import LaunchCommand
from gputrain_tui.recipe.launch_command import read_launch_command
from trainer.contract.errors import RequestError

VALUES = {
    "nnodes": "2", "nproc_per_node": "3", "max_restarts": "4", "rdzv_endpoint": "gpu1:2950", "master_addr": "gpu1",
    "master_port": "2950", "node_rank": "1",
}  # fmt: skip
SAME = {"standalone": "a recipe of one node is standalone", "help": "prints the help"}
"""Options that change nothing here, each with the reason."""
REFUSED = {
    "no_python": "starts another program",
    "run_path": "starts another program",
    "virtual_local_rank": "--virtual-local-rank gives",
}
NEEDED = {"master_port": ["--nnodes", "2", "--master-addr", "gpu1"], "master_addr": ["--nnodes", "2"],
          "rdzv_endpoint": ["--nnodes", "2"]}  # fmt: skip
"""Options without which another has no effect in torchrun either."""


def refuse_to_ask(python: str | None, words: Sequence[str]) -> AccelerateLaunch:
    raise AssertionError("torchrun needs no accelerate")


def read(words: Sequence[str]) -> LaunchCommand:
    return read_launch_command(words, read_file=lambda name: "", ask_accelerate=refuse_to_ask)


OPTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest not in SAME]


@pytest.mark.parametrize("action", OPTIONS, ids=lambda action: action.dest)
def test_no_option_of_torchrun_disappears(action: argparse.Action) -> None:
    chosen = str(next(iter(action.choices or ["7"])))
    value = [] if action.nargs == 0 else [VALUES.get(action.dest, chosen)]
    needed = NEEDED.get(action.dest, [])
    without = read(["torchrun", *needed, "train.py"])
    for flag in action.option_strings:
        command = ["torchrun", *needed, flag, *value, "train.py"]
        get_args_parser().parse_args(command[1:])
        if action.dest in REFUSED:
            with pytest.raises(RequestError, match=REFUSED[action.dest]):
                read(command)
            continue
        found = read(command)
        assert found.script == "train.py"
        changed = (found.nodes, found.cluster, found.module) != (without.nodes, without.cluster, without.module)
        names = [note for note in found.notes if action.dest.replace("_", "-") in note.replace("_", "-")]
        assert changed or names, found


@pytest.mark.parametrize("depth", [["--depth=24"], ["--depth", "24", "--", "-x"], ["x", "--"]])
@pytest.mark.parametrize("dashes", [[], ["--"]])
@pytest.mark.parametrize("module", [[], ["-m"]])
def test_the_script_gets_the_arguments_that_torchrun_gives_it(
    module: list[str], dashes: list[str], depth: list[str]
) -> None:
    words = ["--nproc-per-node", "2", *module, "pkg.mod", *dashes, *depth]
    theirs = get_args_parser().parse_args(words)
    found = read(["torchrun", *words])
    assert (found.script, found.args) == (theirs.training_script, theirs.training_script_args)


@pytest.mark.parametrize("prefix", ["--nn", "--master_a", "--rdzv_e", "--stand"])
def test_a_shortened_flag_is_read_as_torchrun_reads_it(prefix: str) -> None:
    value = [] if prefix == "--stand" else ["gpu1:7" if prefix == "--rdzv_e" else "gpu1" if "master" in prefix else "2"]
    theirs = parse_args([prefix, *value, "train.py"])
    whole = next(name for name in vars(theirs) if f"--{name}".startswith(prefix))
    flag = f"--{whole.replace('_', '-')}"
    short, full = read(["torchrun", prefix, *value, "train.py"]), read(["torchrun", flag, *value, "train.py"])
    assert (short.nodes, short.cluster, short.script) == (full.nodes, full.cluster, full.script)
