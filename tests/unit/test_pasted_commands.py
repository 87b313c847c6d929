"""Command lines as people paste them from pages and scripts: the recipe that each becomes, or the refusal."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from machines import gpu, machine
from plans import HERE

from gputrain_tui.plan.planner import plan
from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.launch_command import read_launch_command
from gputrain_tui.recipe.new_recipe import from_command
from gputrain_tui.recipe.shell_text import read_pasted_command
from trainer.contract.errors import RequestError

FILES = {
    "hosts": "h1\nh2\n",
    "deepspeed_hosts": "h1 slots=4\nh2 slots=4\n",
    "spawn.py": "import torch.multiprocessing as mp\nmp.spawn(run, nprocs=4)\n",
    "spawn_all.py": "import torch.multiprocessing as mp\nn = torch.cuda.device_count()\nmp.spawn(run, nprocs=n)\n",
    "spawn_some.py": "import torch.multiprocessing as mp\nmp.spawn(run, nprocs=args.n)\n",
    "pkg/spawn.py": "from torch.multiprocessing import spawn\nWORLD_SIZE = 2\nspawn(run, nprocs=WORLD_SIZE)\n",
    "quiet.py": "import torch.multiprocessing as mp\n# mp.spawn(run, nprocs=4)\n",
}
EIGHT_GPUS = machine(*map(gpu, range(8)))
HOME = str(Path.home())

# What the recipe has besides its name; [[cluster.nodes]] first.
TRANSLATED: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    # torchrun: nanoGPT, nanochat, PyTorch's tutorials, torchvision, torchtitan
    (
        "torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py --batch_size=32",
        [{"ranks": 4}],
        {"train": {"script": "train.py", "args": ["config/train_gpt2.py", "--batch_size=32"]}},
    ),
    (
        "OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=20 --run=dummy",
        [{"ranks": 8}],
        {
            "cluster": {"env": {"OMP_NUM_THREADS": "1"}},
            "train": {"script": "scripts.base_train", "module": True, "args": ["--depth=20", "--run=dummy"]},
        },
    ),
    (
        "$ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=123.456.123.456 \\\n"
        "    --master_port=1234 train.py   # on the first node\n",
        [{"host": "123.456.123.456", "ranks": 8}, {"host": "host1", "ranks": 8}],
        {"cluster": {"init_method": "tcp://123.456.123.456:1234"}, "train": {"script": "train.py"}},
    ),
    (
        "torchrun --nproc_per_node=gpu multigpu_torchrun.py 50 10",
        [{"gpus": "all"}],
        {"train": {"script": "multigpu_torchrun.py", "args": ["50", "10"]}},
    ),
    (
        'NGPU=8\nCONFIG_FILE="./llama3_8b.toml"\nPYTORCH_ALLOC_CONF="expandable_segments:True" \\\n'
        "torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
        "--local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --job.config_file ${CONFIG_FILE}",
        [{"ranks": 8}],
        {
            "cluster": {"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
            "train": {
                "script": "torchtitan.train", "module": True, "args": ["--job.config_file", "./llama3_8b.toml"],
            },
        },
    ),
    (
        'export DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1"\ntorchrun $DISTRIBUTED_ARGS pretrain_gpt.py --bf16',
        [{"ranks": 8}],
        {
            "cluster": {"env": {"DISTRIBUTED_ARGS": "--nproc_per_node 8 --nnodes 1"}},
            "train": {"script": "pretrain_gpt.py", "args": ["--bf16"]},
        },
    ),
    (
        "export NCCL_P2P_DISABLE=1; torchrun --nproc-per-node 2 train.py",
        [{"ranks": 2}],
        {"cluster": {"env": {"NCCL_P2P_DISABLE": "1"}}, "train": {"script": "train.py"}},
    ),
    ("torchrun --nproc-per-node 2 train.py 2>&1 | tee train.log", [{"ranks": 2}], {"train": {"script": "train.py"}}),
    (
        "(venv) me@box:~/nanoGPT$ torchrun --nproc-per-node 2 train.py --data ~/data --out 'a b'",
        [{"ranks": 2}],
        {"train": {"script": "train.py", "args": ["--data", f"{HOME}/data", "--out", "a b"]}},
    ),
    ("!torchrun --nproc-per-node 2 train.py", [{"ranks": 2}], {"train": {"script": "train.py"}}),
    # torch.distributed.launch and .run: detectron-style and older repositories
    (
        "python -m torch.distributed.launch --nproc_per_node=8 --use_env main.py --coco_path /data/coco",
        [{"ranks": 8}],
        {"train": {"script": "main.py", "args": ["--coco_path", "/data/coco"]}},
    ),
    (
        "CUDA_VISIBLE_DEVICES=0,1 python3 -u -m torch.distributed.launch --nproc_per_node=2 "
        "--master_port 29501 train.py",
        [{"gpus": [0, 1]}],
        {"train": {"script": "train.py", "local_rank_flag": "--local-rank"}},
    ),
    (
        "python -m torch.distributed.run --nproc_per_node 4 --nnodes 1 run_pretraining.py --lr 1e-4",
        [{"ranks": 4}],
        {"train": {"script": "run_pretraining.py", "args": ["--lr", "1e-4"]}},
    ),
    # accelerate
    ("accelerate launch nlp_example.py", [{"gpus": "all"}], {"train": {"script": "nlp_example.py"}}),
    (
        "accelerate launch --multi_gpu --mixed_precision=bf16 --num_processes=4 train_text_to_image.py \\\n"
        '  --pretrained_model_name_or_path="stabilityai/sd" \\\n  --resolution=512 --center_crop',
        [{"ranks": 4}],
        {
            "cluster": {"env": {"ACCELERATE_MIXED_PRECISION": "bf16"}},
            "train": {
                "script": "train_text_to_image.py",
                "args": ["--pretrained_model_name_or_path=stabilityai/sd", "--resolution=512", "--center_crop"],
            },
        },
    ),
    (
        "accelerate-launch --cpu --num_processes 2 complete_nlp_example.py",
        [{"cpu_ranks": 2}],
        {"train": {"script": "complete_nlp_example.py"}},
    ),
    (
        "accelerate launch --num_processes 8 --use_fsdp -m axolotl.cli.train config.yml",
        [{"ranks": 2}],
        {
            "cluster": {"env": {"ACCELERATE_USE_FSDP": "true"}},
            "train": {"script": "axolotl.cli.train", "module": True, "args": ["config.yml"]},
        },
    ),
    (
        "uv run accelerate launch --num_processes 2 train.py",
        [{"ranks": 2}],
        {"train": {"script": "train.py"}},
    ),
    # DeepSpeed
    (
        "deepspeed --num_gpus=8 run_clm.py --deepspeed ds_config.json --fp16",
        [{"gpus": 8}],
        {
            "train": {
                "script": "run_clm.py", "local_rank_flag": "--local_rank",
                "args": ["--deepspeed", "ds_config.json", "--fp16"],
            },
        },
    ),
    (
        "deepspeed --hostfile=deepspeed_hosts --no_local_rank train.py",
        [{"host": "h1", "gpus": 4}, {"host": "h2", "gpus": 4}],
        {"train": {"script": "train.py"}},
    ),
    ("nohup deepspeed --include localhost:0,3 train.py > out.log 2>&1 &", [{"gpus": [0, 3]}],
     {"train": {"script": "train.py", "local_rank_flag": "--local_rank"}}),
    # python alone
    (
        "python main.py -a resnet50 --dist-url 'tcp://127.0.0.1:2345' --dist-backend 'nccl' "
        "--multiprocessing-distributed --world-size 1 --rank 0 /data/imagenet",
        [{"gpus": "all"}],
        {
            "train": {
                "script": "main.py",
                "starts_ranks": True,
                "args": [
                    "-a", "resnet50", "--dist-url", "tcp://127.0.0.1:2345", "--dist-backend", "nccl",
                    "--multiprocessing-distributed", "--world-size", "1", "--rank", "0", "/data/imagenet",
                ],
            },
        },
    ),
    ("python spawn.py", [{"ranks": 4}], {"train": {"script": "spawn.py", "starts_ranks": True}}),
    ("CUDA_VISIBLE_DEVICES=1,2,3,4,5 python spawn.py", [{"gpus": [1, 2, 3, 4]}],
     {"train": {"script": "spawn.py", "starts_ranks": True}}),
    ("python -m pkg.spawn", [{"ranks": 2}],
     {"train": {"script": "pkg.spawn", "module": True, "starts_ranks": True}}),
    ("python spawn_all.py", [{"gpus": "all"}], {"train": {"script": "spawn_all.py", "starts_ranks": True}}),
    ("python spawn_some.py", [{"ranks": 1}], {"train": {"script": "spawn_some.py", "starts_ranks": True}}),
    ("CUDA_VISIBLE_DEVICES=1,2 python spawn_some.py", [{"gpus": [1, 2]}],
     {"train": {"script": "spawn_some.py", "starts_ranks": True}}),
    ("srun -N 1 python spawn.py", [{"gpus": 4}],
     {"slurm": {"nodes": 1}, "train": {"script": "spawn.py", "starts_ranks": True}}),
    ("python quiet.py", [{"ranks": 1}], {"train": {"script": "quiet.py"}}),
    ("python -m pkg.train +trainer.devices=2", [{"ranks": 1}],
     {"train": {"script": "pkg.train", "module": True, "args": ["+trainer.devices=2"]}}),
    # prefixes
    ("uv run torchrun --nproc-per-node 2 train.py", [{"ranks": 2}], {"train": {"script": "train.py"}}),
    ("uv run --with wandb --extra gpu train.py --lr 1", [{"ranks": 1}],
     {"train": {"script": "train.py", "args": ["--lr", "1"]}}),
    ("uv run --with torch==2.6 --with accelerate --with=deepspeed==1 --with-requirements req.txt --group python "
     "--package train.py --index https://x/simple -p python3.12 -- torchrun --nproc-per-node 2 train.py",
     [{"ranks": 2}], {"train": {"script": "train.py"}}),
    ("uv --directory torchrun run --module pkg.train", [{"ranks": 1}],
     {"train": {"script": "pkg.train", "module": True}}),
    ("micromamba run -n torchrun -e A=B python train.py", [{"ranks": 1}], {"train": {"script": "train.py"}}),
    ("env -C python -u torchrun A=B time -o train.py -f A=C exec -a x.py torchrun train.py", [{"ranks": 1}],
     {"cluster": {"env": {"A": "B"}}, "train": {"script": "train.py"}}),
    ("uv run -m pkg.train", [{"ranks": 1}], {"train": {"script": "pkg.train", "module": True}}),
    ("poetry run torchrun --nproc-per-node=2 train.py", [{"ranks": 2}], {"train": {"script": "train.py"}}),
    ("conda run --no-capture-output -n ml torchrun --nproc-per-node 2 train.py", [{"ranks": 2}],
     {"train": {"script": "train.py"}}),
    ("env A=B C='d e' torchrun --nproc-per-node 2 train.py", [{"ranks": 2}],
     {"cluster": {"env": {"A": "B", "C": "d e"}}, "train": {"script": "train.py"}}),
    ("env -u LD_PRELOAD A=B python train.py", [{"ranks": 1}],
     {"cluster": {"env": {"A": "B"}}, "train": {"script": "train.py"}}),
    ("time numactl --cpunodebind 0 --membind=0 taskset -c 0-7 torchrun --nproc-per-node 2 train.py", [{"ranks": 2}],
     {"train": {"script": "train.py"}}),
    ("nice -n 10 timeout -k 5 1h torchrun --nproc-per-node 2 train.py", [{"ranks": 2}],
     {"train": {"script": "train.py"}}),
    ("bash -c 'A=1 torchrun --nproc-per-node 2 train.py'", [{"ranks": 2}],
     {"cluster": {"env": {"A": "1"}}, "train": {"script": "train.py"}}),
    # Slurm
    (
        "srun -N 2 --ntasks-per-node=1 --gpus-per-node=4 -p gpu -t 01:00:00 torchrun --nnodes 2 --nproc_per_node 4 "
        "--rdzv_id $RANDOM --rdzv_backend c10d --rdzv_endpoint $head_node_ip:29500 multinode_torchrun.py 50 10",
        [{"gpus": 4}],
        {
            "slurm": {"nodes": 2, "partition": "gpu", "time": "01:00:00"},
            "train": {"script": "multinode_torchrun.py", "args": ["50", "10"]},
        },
    ),
    (
        "srun torchrun --nnodes 4 --nproc_per_node 1 --rdzv_id 7 --rdzv_endpoint $head:29500 train.py",
        [{"gpus": 1}],
        {"slurm": {"nodes": 4}, "train": {"script": "train.py"}},
    ),
    (
        'srun --jobid $SLURM_JOBID -N2 bash -c "python -m torch.distributed.run --nproc_per_node 8 '
        '--nnodes $SLURM_NNODES --node_rank $SLURM_PROCID --master_addr $MASTER_ADDR train.py"',
        [{"gpus": 8}],
        {"slurm": {"nodes": 2}, "train": {"script": "train.py"}},
    ),
    (
        "srun --nodes=2 --ntasks-per-node=4 --gres=gpu:a100:4 --cpus-per-task=8 --mem=0 -A proj --label "
        "python train.py --lr 1",
        [{"gpus": 4}],
        {
            "slurm": {"nodes": 2, "gpu_type": "a100", "account": "proj", "mem": "0", "extra": ["--cpus-per-task=32"]},
            "train": {"script": "train.py", "args": ["--lr", "1"]},
        },
    ),
    ("srun -n 8 -N 2 --exclusive -w n[1-2] python -u train.py", [{"gpus": 4}],
     {"slurm": {"nodes": 2, "extra": ["--exclusive", "--nodelist=n[1-2]"]}, "train": {"script": "train.py"}}),
    ("srun -n 4 -N 2 --ntasks-per-node=4 python train.py", [{"gpus": 2}],
     {"slurm": {"nodes": 2}, "train": {"script": "train.py"}}),
    ("srun python train.py", [{"gpus": 1}], {"slurm": {"nodes": 1}, "train": {"script": "train.py"}}),
    (
        "srun -N 2 --export=ALL,NCCL_DEBUG=INFO accelerate launch --cpu --num_machines 2 --num_processes 4 "
        "--machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR train.py",
        [{"cpu_ranks": 2}],
        {"cluster": {"env": {"NCCL_DEBUG": "INFO"}}, "slurm": {"nodes": 2}, "train": {"script": "train.py"}},
    ),
    # Fabric
    (
        "fabric run --accelerator=cuda --devices=4 --strategy=ddp --precision=bf16-mixed train.py --lr 0.1",
        [{"gpus": 4}],
        {
            "cluster": {
                "env": {
                    "LT_CLI_USED": "1", "LT_ACCELERATOR": "cuda", "LT_STRATEGY": "ddp", "LT_PRECISION": "bf16-mixed",
                    "LT_DEVICES": "4", "LT_NUM_NODES": "1",
                },
            },
            "train": {"script": "train.py", "args": ["--lr", "0.1"]},
        },
    ),
    (
        "fabric run train.py --lr 0.1 --devices 2,3",
        [{"gpus": [2, 3]}],
        {
            "cluster": {"env": {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "1"}},
            "train": {"script": "train.py", "args": ["--lr", "0.1"]},
        },
    ),
    (
        "lightning run model --accelerator=cpu --devices=2 train.py",
        [{"cpu_ranks": 2}],
        {
            "cluster": {
                "env": {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_NUM_NODES": "1"},
            },
            "train": {"script": "train.py"},
        },
    ),
]  # fmt: skip

REFUSED = [
    ("horovodrun -np 4 -H localhost:4 python train.py", "not a known launcher.*MPI.* the command, such as torchrun"),
    ("mpirun -np 4 python train.py", "'mpirun' is not a known launcher: .*where MPI"),
    ("bash train.sh", "a shell script may do anything: give init the line in it"),
    ("./scripts/run_ddp.sh 8", "a shell script may do anything: give init the line in it"),
    ("my.toml torchrun train.py", "'my.toml' is not a known launcher: .* by --output 'my.toml', before the command"),
    ("yolo detect train data=coco8.yaml device=0,1", "'yolo' is not a known launcher"),
    ("ray job submit -- python train.py", "'ray' is not a known launcher"),
    ("./train.sbatch", "give init the line in it"),
    ("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py", r"a batch script.*options into \[slurm\]"),
    ("docker run --gpus all image torchrun train.py", "where MPI, a container, .* give init only the command"),
    ("srun --container-image=nvcr.io#x python train.py", "--container-image starts the command in a container"),
    ("srun -N 2 torchrun --nproc-per-node 4 train.py", "on 2 nodes, but its own flags say 1: give both the same"),
    ("srun -n 8 --ntasks-per-node=3 python train.py", "--ntasks is 8, but must be a multiple of the 3 nodes"),
    ("srun --time $LIMIT python train.py", r"has '\$LIMIT', whose value only your shell knows"),
    ("srun --exclude=$BAD python train.py", r"has '\$BAD', whose value only your shell knows"),
    ("srun -D $HOME/x python train.py", r"has '\$HOME', whose value only your shell knows"),
    ("srun -n 3 -N 2 python train.py", "--ntasks is 3, but must be a multiple of the 2 nodes"),
    ("accelerate $X train.py", r"has '\$X', whose value only your shell knows"),
    ("uv run mytrain --config x.py", "'mytrain' is not a known launcher"),
    ("hatch run gpu:torchrun train.py", "'gpu:torchrun' is not a known launcher"),
    ("uv pip install torch", "uv 'pip' starts no training: give init uv run COMMAND"),
    ("for i in 1 2; do torchrun train.py; done", "the command has 'for', which only a shell can run"),
    ("cd x\ntorchrun train.py --name 'a b' $X", "2 commands .*\"torchrun train.py --name 'a b' \\$X\""),
    ("cd examples && torchrun train.py", "paste one, .*: 'cd examples', 'torchrun"),
    ("torchrun --nproc-per-node 2 train.py --run=$WANDB_RUN", r"has '\$WANDB_RUN', whose value only your shell knows"),
    ("torchrun --nproc-per-node $(nvidia-smi -L | wc -l) train.py", r"has '\$\(nvidia-smi -L \| wc -l\)', whose value"),
    ("torchrun train.py --data <path to imagenet>", "has <path to imagenet>: put its value in place of that"),
    ("nsys profile -o out torchrun train.py", "a profiler .* give init only the command"),
    ("python -c 'import train'", "names no script: python -c has its program on the line"),
]  # fmt: skip


def read_file(name: str) -> str:
    if name not in FILES:
        raise FileNotFoundError(2, "No such file or directory", name)
    return FILES[name]


def ask_accelerate(python: str | None, words: Sequence[str]) -> AccelerateLaunch:
    """Answer as accelerate does for two processes with FSDP."""
    return AccelerateLaunch(env={"ACCELERATE_USE_FSDP": "true"}, torchrun={"nproc_per_node": "2"})


def recipe_text(text: str) -> str:
    command = read_launch_command(read_pasted_command(text).argv, read_file=read_file, ask_accelerate=ask_accelerate)
    return from_command(command, typed="").text(file="r.toml")


@pytest.mark.parametrize(("text", "nodes", "tables"), TRANSLATED, ids=[text[:60] for text, *_ in TRANSLATED])
def test_a_pasted_command_becomes_a_recipe_that_can_be_planned(
    text: str, nodes: list[dict[str, Any]], tables: dict[str, Any]
) -> None:
    written = recipe_text(text)
    read = tomllib.loads(written)
    found = read.pop("cluster").pop("nodes")
    read = tomllib.loads(written)
    del read["name"], read["cluster"]["nodes"]
    assert found == nodes
    assert {name: table for name, table in read.items() if table} == tables
    recipe = build(written, name="r.toml")
    planned = plan(recipe, {"localhost": EIGHT_GPUS}, local=HERE) if "host" not in str(nodes) else None
    per_node = sum(len(each) if isinstance(each, list) else int(each) for node in nodes for each in counts(node))
    if planned is not None and "all" not in str(nodes):
        assert planned.world_size == per_node * tables.get("slurm", {}).get("nodes", 1)


def counts(node: dict[str, Any]) -> list[Any]:
    return [value for name, value in node.items() if name in ("ranks", "gpus", "cpu_ranks") and value != "all"]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text[:60] for text, _ in REFUSED])
def test_what_no_recipe_can_say_is_refused_with_what_to_do_instead(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        recipe_text(text)
    assert "\n" not in str(refused.value)
    assert "\ue000" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("torchrun train.py 2>&1 | tee log", "`gputrain logs RUN` prints what each rank has printed"),
        ("nohup torchrun train.py &", "& is left out: `gputrain run --detach` goes on"),
        ("nohup torchrun train.py &", "nohup is left out: `gputrain run --detach` outlives"),
        ("uv run --with wandb train.py", "start gputrain itself with it (uv run --with wandb gputrain run …)"),
        ("taskset -c 0-7 torchrun train.py", "taskset -c 0-7 is left out: put it before gputrain run"),
        ("env -u A python train.py", "env -u A is left out"),
        ("torchrun train.py --files data/*.bin", "data/*.bin stays as it is"),
        ("uv run --with torch==2.6 torchrun train.py", "(uv run --with torch==2.6 gputrain run …)"),
        ("mamba run -e HF_TOKEN=hidden torchrun train.py", "(mamba run -e 'HF_TOKEN=•••' gputrain run …)"),
        ("uv run --index $INDEX torchrun train.py", "(uv run --index $INDEX gputrain run …)"),
        ("python spawn.py", "spawn.py starts its ranks itself (torch.multiprocessing): ranks is how many"),
        ("python spawn_some.py", "ranks is how many it starts on a node: write the number, which its text does not"),
        (
            "torchrun spawn.py",
            "starts ranks itself: if it does so under torchrun too, each rank starts others; then",
        ),
        ("python main.py --multiprocessing-distributed", "starts its ranks itself (--multiprocessing-distributed)"),
        ("srun -N 2 python train.py", "put the job's nodes, partition and time into [slurm]"),
        ("srun -N 2 --gpus-per-node=8 python train.py", "asks for 8 GPUs on each node, but the recipe has 1 there"),
        ("srun --label --mpi=none python train.py", "srun --label, --mpi: not needed"),
        ("srun --bb=x python train.py", "srun --bb=x has no counterpart and is left out"),
        ("srun torchrun --rdzv-endpoint $HOST:1 train.py", "--rdzv-endpoint $HOST:1: not needed, as gputrain computes"),
    ],
)
def test_what_is_left_out_is_told_with_what_to_do(text: str, note: str) -> None:
    pasted = read_pasted_command(text)
    command = read_launch_command(pasted.argv, read_file=read_file, ask_accelerate=ask_accelerate)
    notes = [*pasted.notes, *command.notes]
    assert any(note in line for line in notes), notes
