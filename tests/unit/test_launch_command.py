"""Commands of other launchers as recipes: mapped flags, notes and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.command_launchers import LaunchCommand
from gputrain_tui.recipe.launch_command import read_launch_command
from gputrain_tui.recipe.new_recipe import from_command
from gputrain_tui.recipe.shell_text import read_pasted_command
from trainer.contract.errors import RequestError

FILES = {
    "hosts": "gpu1 slots=4\n# a comment\ngpu2 slots=2\n",
}


def read_file(name: str) -> str:
    if name not in FILES:
        raise FileNotFoundError(2, "No such file or directory", name)
    return FILES[name]


ASKED: list[list[str]] = []


def ask_accelerate(python: str | None, words: Sequence[str]) -> AccelerateLaunch:
    """Answer as accelerate does for two processes with FSDP."""
    ASKED.append(list(words))
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "2,5"}
    return AccelerateLaunch(env=env, torchrun={"nproc_per_node": "2", "tee": "3", "master_port": "29500"})


def read(text: str) -> LaunchCommand:
    command = read_launch_command(read_pasted_command(text).argv, read_file=read_file, ask_accelerate=ask_accelerate)
    recipe = from_command(command, typed=text.replace("\n", " "))
    assert build(recipe.text(file="r.toml"), name="r.toml").script is not None, "the recipe loads"
    return command


@pytest.mark.parametrize(
    ("text", "nodes", "cluster"),
    [
        ("torchrun train.py", [{"ranks": 1}], {}),
        ("torchrun --nproc-per-node 4 train.py", [{"ranks": 4}], {}),
        ("torchrun --nproc_per_node=gpu --standalone train.py", [{"gpus": "all"}], {}),
        ("torchrun --nproc 4 train.py", [{"ranks": 4}], {}),
        ("PET_NPROC_PER_NODE=4 torchrun train.py", [{"ranks": 4}], {}),
        ("PET_NPROC_PER_NODE=4 torchrun --nproc-per-node 2 train.py", [{"ranks": 2}], {}),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", [{"ranks": 2}], {}),
        ("python3.11 -u -m torch.distributed.launch --use_env --nproc_per_node 8 train.py", [{"ranks": 8}], {}),
        ("CUDA_VISIBLE_DEVICES=1,3,5 torchrun --nproc-per-node 2 train.py", [{"gpus": [1, 3]}], {}),
        ("CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 train.py", [{"cpu_ranks": 2}], {}),
        ("CUDA_VISIBLE_DEVICES=-1 python train.py", [{"cpu_ranks": 1}], {}),
        ("CUDA_VISIBLE_DEVICES=4 accelerate launch --gpu_ids 0,1 --num_processes 2 train.py", [{"gpus": [0, 1]}], {}),
        ("accelerate launch --gpu_ids 0,1 train.py", [{"gpus": [0, 1]}], {}),
        (
            "$ torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 \\\n  --rdzv-endpoint=gpu1:2950 train.py",
            [{"host": "gpu1", "ranks": 8}, {"host": "host1", "ranks": 8}],
            {"init_method": "tcp://gpu1:2950"},
        ),
        (
            "/opt/env/bin/torchrun --nnodes=1:2 --max-restarts 3 --master_addr 10.0.0.1 train.py",
            [{"host": "10.0.0.1", "ranks": 1}, {"host": "host1", "ranks": 1}],
            {"python": "/opt/env/bin/python", "max_restarts": 3},
        ),
        (
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu1:29400 train.py",
            [{"host": "gpu1", "ranks": 8}, {"host": "host1", "ranks": 8}],
            {},
        ),
        (
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint=gpu1:29501 train.py",
            [{"host": "gpu1", "ranks": 8}, {"host": "host1", "ranks": 8}],
            {"init_method": "tcp://gpu1:29501"},
        ),
        ("accelerate launch train.py", [{"gpus": "all"}], {}),
        ("accelerate launch --multi_gpu --num_processes 4 train.py", [{"ranks": 4}], {}),
        ("accelerate launch --cpu --num_processes 2 train.py", [{"cpu_ranks": 2}], {}),
        ("accelerate launch --gpu_ids 0,2 --num_processes 2 train.py", [{"gpus": [0, 2]}], {}),
        (
            "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip gpu1 "
            "--main_process_port 2000 train.py",
            [{"host": "gpu1", "ranks": 8}, {"host": "host1", "ranks": 8}],
            {"init_method": "tcp://gpu1:2000"},
        ),
        ("deepspeed train.py --deepspeed ds.json", [{"gpus": "all"}], {}),
        ("deepspeed --num_gpus=2 train.py", [{"gpus": 2}], {}),
        ("deepspeed --include localhost:0,3 train.py", [{"gpus": [0, 3]}], {}),
        (
            "deepspeed -i gpu1:0,1@gpu2 train.py",
            [{"host": "gpu1", "gpus": [0, 1]}, {"host": "gpu2", "gpus": "all"}],
            {},
        ),
        ("deepspeed -H hosts train.py", [{"host": "gpu1", "gpus": 4}, {"host": "gpu2", "gpus": 2}], {}),
        ("deepspeed --hostfile hosts --num_nodes 1 --num_gpus 1 train.py", [{"host": "gpu1", "gpus": 1}], {}),
        ("python train.py", [{"ranks": 1}], {}),
    ],
)
def test_hosts_and_ranks_become_nodes(text: str, nodes: list[dict[str, Any]], cluster: dict[str, Any]) -> None:
    command = read(text)
    assert (command.nodes, command.cluster) == (nodes, cluster)
    assert command.script == "train.py"


@pytest.mark.parametrize(
    ("text", "script", "args", "env"),
    [
        ("torchrun train.py --lr 0.1 -- -x", "train.py", ["--lr", "0.1", "--", "-x"], {}),
        ("torchrun --standalone 'my train.py' \"a 'b'\" ''", "my train.py", ["a 'b'", ""], {}),
        ("torchrun -m pkg.train --lr 1", "pkg.train", ["--lr", "1"], {}),
        ("torchrun --nproc-per-node 8 -m pkg.train -- --depth=24 -- x", "pkg.train", ["--depth=24", "--", "x"], {}),
        ("accelerate launch --num_processes 2 train.py -- --a", "train.py", ["--a"], {}),
        ("python train.py -- --a", "train.py", ["--", "--a"], {}),
        ("env NCCL_DEBUG=INFO A='b c' torchrun train.py", "train.py", [], {"NCCL_DEBUG": "INFO", "A": "b c"}),
        ("MASTER_PORT=1 torchrun train.py", "train.py", [], {}),
        ("WANDB_API_KEY=hidden torchrun train.py", "train.py", [], {}),
        ("TOKENIZERS_PARALLELISM=false torchrun train.py", "train.py", [], {"TOKENIZERS_PARALLELISM": "false"}),
        ("torchrun --brand-new-switch train.py", "train.py", [], {}),
        ("torchrun --brand-new value train.py", "train.py", [], {}),
        (
            "accelerate launch --mixed_precision fp16 --num_cpu_threads_per_process 4 train.py",
            "train.py",
            [],
            {"ACCELERATE_MIXED_PRECISION": "fp16", "OMP_NUM_THREADS": "4"},
        ),
    ],
)
def test_the_script_its_arguments_and_the_environment_are_kept(
    text: str, script: str, args: list[str], env: dict[str, str]
) -> None:
    command = read(text)
    assert (command.script, command.args, command.env) == (script, args, env)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("torchrun --log-dir logs train.py", "--log-dir logs has no counterpart and is left out"),
        (
            "torchrun --log-line-prefix-template x train.py",
            "--log-line-prefix-template x has no counterpart and is left out",
        ),
        (
            "torchrun --nnodes 3 train.py",
            "does not name 3 of its 3 hosts: put their names in place of host0, host1, ho",
        ),
        ("torchrun --nnodes 1:2 train.py", "--nnodes 1:2 is elastic; the recipe always has 2 nodes"),
        ("torchrun --node-rank 1 --rdzv-id 7 train.py", "--rdzv-id, --node-rank: not needed, as one recipe starts"),
        ("torchrun --log_dir=logs train.py", "--log_dir logs has no counterpart and is left out"),
        ("torchrun --bogus-flag 3 train.py", "--bogus-flag 3 is left out: it is no option of torchrun"),
        ("torchrun --nprocs_per_node 3 train.py", "that gputrain knows; did you mean '--nproc-per-node'?"),
        ("deepspeed --num_gpu_s 3 train.py", "no option of deepspeed that gputrain knows; did you mean '--num_gpus'?"),
        ("torchrun --master_port=29501 train.py", "--master_port: not needed, as gputrain finds a free port"),
        ("deepspeed --master_port 29501 train.py", "--master_port: not needed, as gputrain finds a free port"),
        ("fabric run train.py --main-port 29501", "--main-port: not needed, as gputrain finds a free port"),
        ("python3.9 -u -m torch.distributed.run train.py", "python3.9 is left out: ranks have the Python of gputrain"),
        ("python -O train.py", "-O has no counterpart and is left out"),
        ("MASTER_PORT=1 torchrun train.py", "MASTER_PORT=1 is left out: gputrain computes it"),
        ("WANDB_API_KEY=hidden torchrun train.py", "WANDB_API_KEY is left out"),
        ("HF_TOKEN=hidden python -m torch.distributed.run train.py", "export it before `gputrain run`"),
        ("torchrun train.py --api-key=hidden", "the value of --api-key stands in the recipe: if it is a secret, let"),
        ("python train.py --wandb-token hidden", "the value of --wandb-token stands in the recipe"),
        ("python train.py wandb.api_key=hidden", "the value of wandb.api_key stands in the recipe"),
        ("accelerate launch train.py", "the file saved by `accelerate config` is not read"),
        ("accelerate launch --use_fsdp train.py", "are those that accelerate sets for these flags"),
        ("accelerate launch --use_fsdp train.py", "--tee 3 has no counterpart and is left out"),
        ("accelerate launch --num_processes 2 --machine_rank 1 train.py", "--machine_rank: not needed"),
        ("deepspeed --launcher slurm train.py", "--launcher: not needed"),
        ("python train.py", "python starts one process: raise ranks for more"),
        ("CUDA_VISIBLE_DEVICES=1 python train.py", "python starts one process: name more GPUs in gpus for more"),
    ],
)
def test_flags_without_a_counterpart_are_reported(text: str, note: str) -> None:
    notes = read(text).notes
    assert any(note in line for line in notes), notes
    assert "hidden" not in str(notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no command is given; paste one"),
        ("# torchrun train.py", "no command is given"),
        ("torchrun a.py\ntorchrun b.py", "2 commands are given; paste one"),
        ("torchrun 'train.py", "the command cannot be read: no closing quotation"),
        ("A=1", "no command is given; paste one"),
        ("torchrum train.py", "'torchrum' is not a known launcher: .*; did you mean 'torchrun'?"),
        ("torchrun --nproc-per-node 4", "the torchrun command names no script"),
        ("torchrun --nproc-per-node four train.py", "--nproc-per-node is 'four', but must be a whole number"),
        (
            "torchrun --nproc-per-node train.py --steps 3",
            "names no script: --nproc-per-node has no value of its own, so",
        ),
        ("torchrun --nproc-per-node= train.py", "--nproc-per-node has no value: it must be a whole number"),
        ("CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 train.py", "=0 names 1 GPU, but the command needs 2 on a"),
        ("CUDA_VISIBLE_DEVICES=0 fabric run --devices 2,3 train.py", "=0 names 1 GPU, but the command needs 4 on a"),
        ("CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node gpu train.py", "= names 0 GPUs, but the command needs 1 on"),
        (
            "accelerate launch --gpu_ids 0 --num_processes 2 train.py",
            "--gpu_ids 0 names 1 GPU, but the command needs 2",
        ),
        ("torchrun --nnodes $N train.py", "the command has '\\$N', whose value only your shell knows"),
        ("torchrun --no-python ./train.sh", "starts another program than a Python script"),
        ("accelerate config", "accelerate config does not start training; use accelerate launch"),
        ("accelerate launch --num_machines 2 --num_processes 3 train.py", "must be a multiple of the 2 machines"),
        ("deepspeed --hostfile nowhere train.py", "--hostfile nowhere cannot be read: No such file"),
    ],
)
def test_a_command_that_makes_no_recipe_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        read(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "accelerate launch --use_fsdp --fsdp_version 2 train.py --lr 1",
        "accelerate launch --config_file fsdp.yaml train.py --lr 1",
        "accelerate launch --flag_of_2030 7 train.py --lr 1",
    ],
)
def test_what_only_accelerate_can_translate_it_is_asked(text: str) -> None:
    ASKED.clear()
    command = read(text)
    assert [read_pasted_command(text).argv[2:]] == ASKED
    assert command.env == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert command.nodes == [{"gpus": [2, 5]}]
    assert (command.script, command.args) == ("train.py", ["--lr", "1"])


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py", "--local-rank"),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py", None),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", None),
        ("deepspeed train.py", "--local_rank"),
        ("deepspeed --no_local_rank train.py", None),
    ],
)
def test_a_launcher_that_passes_the_local_rank_makes_a_recipe_that_does(text: str, flag: str | None) -> None:
    assert read(text).local_rank_flag == flag


@pytest.mark.parametrize(
    ("text", "module"), [("torchrun -m pkg.train", True), ("python -m pkg.train", True), ("python pkg/train.py", False)]
)
def test_a_module_stays_a_module(text: str, module: bool) -> None:
    assert read(text).module == module


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepspeed --exclude gpu1:0 train.py", "--exclude cannot be translated: name the GPUs with --include"),
        ("torchrun --virtual-local-rank train.py", "--virtual-local-rank gives each process LOCAL_RANK 0"),
    ],
)
def test_a_flag_that_would_change_the_training_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(text)
