"""HetSeq's commands as its pages say them (``docs/source/distribute.rst`` and ``examples.rst``), on CPUs.

Changed are only the folder, the number of epochs and loader workers, and the address, which is that of no machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_log import newest
from task_data import write_data
from waiting import LIMIT_S

from trainer.contract.options import Distributed
from trainer.contract.schema import check, describe, read_flags
from trainer.environments.dispatch import decide

ADDRESS = "tcp://10.00.123.456:11111"
NODE = f"--distributed-init-method {ADDRESS} --distributed-world-size {{}} --distributed-gpus 4 --distributed-rank {{}}"
SETTINGS: dict[str, list[str]] = {
    "single GPU": ["--distributed-world-size 1 --device-id 1"],
    "four GPUs on a single node": ["--distributed-world-size 4"],
    "two nodes with four GPUs each": [NODE.format(8, first) for first in (0, 4)],
    "four nodes with four GPUs each": [NODE.format(16, first) for first in (0, 4, 8, 12)],
}
MNIST = (
    "--task mnist --optimizer adadelta --lr-scheduler PolynomialDecayScheduler --data {data} --clip-norm 100 "
    "--max-sentences 2 --fast-stat-sync --max-epoch 1 --update-freq 1 --valid-subset test --num-workers 0 "
    "--warmup-updates 0 --total-num-update 50000 --lr 1.01 --cpu"
)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD_SIZE"))}


def typed(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *words.split()],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        cwd=folder,
    )


def decided(words: str, gpus: int) -> Any:
    values, rest = read_flags(words.split(), describe(Distributed))
    assert rest == []
    return decide(check(Distributed, values, where=str), {}, gpus)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_documented_setting_starts_its_ranks_on_its_gpus(setting: str) -> None:
    nodes = [decided(words, 4) for words in SETTINGS[setting]]
    world_size = 4 * len(nodes) if setting != "single GPU" else 1
    assert [node.world_size for node in nodes] == [world_size] * len(nodes)
    assert [rank for node in nodes for rank in node.ranks] == list(range(world_size))
    assert [node.device_ids for node in nodes] == [(1,) if world_size == 1 else (0, 1, 2, 3)] * len(nodes)


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=() if name.startswith("two nodes") else pytest.mark.slow) for name in SETTINGS],
)
def test_a_documented_command_trains_on_all_its_nodes(setting: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    task = MNIST.format(**write_data(tmp_path, "mnist"))
    commands = [f"{task} {words.replace(ADDRESS, address)}" for words in SETTINGS[setting]]
    commands[0] += " --save-dir saved"  # the page has it on the main node alone
    with ThreadPoolExecutor(len(commands)) as pool:
        done = list(pool.map(lambda words: typed(words, tmp_path), commands))
    assert [node.returncode for node in done] == [0] * len(done), done[0].stderr
    assert "--fast-stat-sync has no effect" in done[0].stdout + done[0].stderr
    found = newest(tmp_path / "saved")
    assert found is not None
    world_size = 1 if setting == "single GPU" else 4 * len(commands)
    assert found[1]["updates"] == -(-43 // (2 * world_size)), "43 images, two per rank and step"


def test_the_documented_address_is_refused_in_one_line_because_it_is_none(tmp_path: Path) -> None:
    task = MNIST.format(**write_data(tmp_path, "mnist"))
    done = typed(f"{task} {SETTINGS['two nodes with four GPUs each'][0]}", tmp_path)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if "cannot be resolved" in text]
    assert "10.00.123.456" in line
