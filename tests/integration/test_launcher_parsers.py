"""Every option of torchrun and deepspeed is translated, named as not translated, or refused: none disappears."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import pytest
from deepspeed_parser import deepspeed_parser
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
SAME = {
    "standalone": "a recipe of one node is standalone",
    "help": "prints the help",
    "print_completion": "prints a script for the shell, since torch 2.14",
}
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
        names = [note for note in found.notes if flag in note]
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


# --- deepspeed ------------------------------------------------------------------------------------------------------

DEEPSPEED_VALUES = {"hostfile": "hosts", "include": "localhost:1", "exclude": "gpu1:0"}
DEEPSPEED_REFUSED = {"no_python": "starts another program", "exclude": "cannot be translated",
                     "autotuning": "cannot be translated"}  # fmt: skip
DEEPSPEED_NEEDED = {"master_port": ["-H", "hosts", "--master_addr", "gpu1"], "master_addr": ["-H", "hosts"]}
"""Options without which another has no effect in deepspeed either: it replaces the address of a single node."""
FILES = {"hosts": "gpu1 slots=4\n# two\ngpu2 slots=2\n", ".deepspeed_env": "NCCL_DEBUG=INFO\nMY_CREDS=hunter2\n"}
DEEPSPEED_OPTIONS = [
    action for action in deepspeed_parser()._actions if action.option_strings and action.dest != "help"
]


def read_deepspeed(words: Sequence[str], before: Sequence[str] = ()) -> LaunchCommand:
    def file(name: str) -> str:
        if name not in FILES:
            raise FileNotFoundError(2, "No such file or directory")
        return FILES[name]

    return read_launch_command([*before, "deepspeed", *words], read_file=file, ask_accelerate=refuse_to_ask)


@pytest.mark.parametrize("joined", [False, True], ids=["FLAG VALUE", "FLAG=VALUE"])
@pytest.mark.parametrize("action", DEEPSPEED_OPTIONS, ids=lambda action: action.dest)
@pytest.mark.parametrize("script", ["train.py", "train"])
def test_no_option_of_deepspeed_disappears(action: argparse.Action, script: str, joined: bool) -> None:
    value = [] if action.nargs == 0 else [DEEPSPEED_VALUES.get(action.dest, str(next(iter(action.choices or ["7"]))))]
    needed = DEEPSPEED_NEEDED.get(action.dest, [])
    without = read_deepspeed([*needed, script, "--lr", "1"])
    for flag in action.option_strings:
        given = [flag, *value]
        if joined and value:
            given = ["=".join(given) if flag.startswith("--") else "".join(given)]
        words = [*needed, *given, script, "--lr", "1"]
        theirs = deepspeed_parser().parse_args(words)
        if action.dest in DEEPSPEED_REFUSED:
            with pytest.raises(RequestError, match=DEEPSPEED_REFUSED[action.dest]):
                read_deepspeed(words)
            continue
        found = read_deepspeed(words)
        assert (found.script, found.args) == (theirs.user_script, theirs.user_args)
        parts = [
            (each.nodes, each.cluster, each.module, each.local_rank_flag) for each in (found, without)
        ]  # fmt: skip
        names = [note for note in found.notes if flag in note]
        assert parts[0] != parts[1] or names, found


@pytest.mark.parametrize("flag", ["--num_g", "--num_acc", "--hostf", "--incl", "--master_a", "--no_local", "--enable"])
def test_a_shortened_flag_is_read_as_deepspeed_reads_it(flag: str) -> None:
    value = {"--num_g": ["2"], "--num_acc": ["2"], "--hostf": ["hosts"], "--incl": ["localhost:0"], "--master_a": ["a"],
             "--enable": ["logs"]}.get(flag, [])  # fmt: skip
    deepspeed_parser().parse_args([flag, *value, "train.py"])
    whole = next(each for action in DEEPSPEED_OPTIONS for each in action.option_strings if each.startswith(flag))
    short, long = (read_deepspeed([each, *value, "train"]) for each in (flag, whole))
    notes = [note.replace(flag, whole) for note in short.notes]
    assert replace(short, typed=long.typed, notes=notes) == long


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("-H hosts --include gpu2", [{"host": "gpu2", "gpus": 2}]),
        ("-H hosts -i gpu2@gpu1:0,3", [{"host": "gpu1", "gpus": [0, 3]}, {"host": "gpu2", "gpus": 2}]),
        ("-H hosts --num_gpus 1", [{"host": "gpu1", "gpus": 1}, {"host": "gpu2", "gpus": 1}]),
        ("-H hosts --num_nodes 1", [{"host": "gpu1", "gpus": 4}]),
        ("--num_nodes -1 --num_gpus -1", [{"gpus": "all"}]),
        ("--num_accelerators 3", [{"gpus": 3}]),
    ],
)
def test_hosts_and_gpus_are_those_that_deepspeed_takes(words: str, nodes: list[dict[str, object]]) -> None:
    assert read_deepspeed([*words.split(), "train.py"]).nodes == nodes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-i localhost:0 --num_gpus 2", "leave out --num_nodes and --num_gpus"),
        ("-H hosts -i gpu3", "--include names 'gpu3', which is not in the hostfile; did you mean 'gpu"),
    ],
)
def test_what_deepspeed_refuses_is_refused(words: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_deepspeed([*words.split(), "train.py"])


def test_the_file_of_variables_of_deepspeed_is_named_without_its_values() -> None:
    notes = "\n".join(read_deepspeed(["-H", "hosts", "train.py"]).notes)
    assert ".deepspeed_env sets NCCL_DEBUG, MY_CREDS, which is left out" in notes
    assert "hunter2" not in notes
    assert ".deepspeed_env" not in "".join(read_deepspeed(["--num_gpus", "2", "train.py"]).notes)


@pytest.mark.parametrize(
    ("words", "gpus"), [("", [2, 3]), ("--num_gpus 2", 2), ("-i localhost:0", [0]), ("--module", [2, 3])]
)
def test_visible_devices_count_where_deepspeed_heeds_them(words: str, gpus: object) -> None:
    found = read_deepspeed([*words.split(), "train"], before=["CUDA_VISIBLE_DEVICES=2,3"])
    assert [node["gpus"] for node in found.nodes] == [gpus]
    assert ("CUDA_VISIBLE_DEVICES=2,3 is left out" in "".join(found.notes)) == (gpus != [2, 3])
