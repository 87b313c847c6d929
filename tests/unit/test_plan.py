from __future__ import annotations

import json
import os
import random
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from plans import HERE, named_nodes, plan_for, recipe, remote_nodes

from gputrain_tui.hosts.host_names import DEFAULT_PORT, LocalFacts
from gputrain_tui.hosts.inventory import Gpu, GpuProcess, Inventory
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.lifecycle.restart import next_plan
from gputrain_tui.plan.batch_script import script
from gputrain_tui.plan.planner import (
    Plan,
    plan,
    rendezvous_port,
    shell_commands,
    task_flags,
    with_rendezvous,
    with_run_dir,
)
from gputrain_tui.recipe.build import build, load
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.contract.record import RunDir
from trainer.contract.schema import check, describe, read_flags
from trainer.contract.task_options import LmOptions
from trainer.environments.dispatch import decide
from trainer.host.addresses import own_addresses
from trainer.host.cores import Cpus
from trainer.host.memory import Memory
from trainer.host.ports import free_port, is_port_free, port_holder

ROOT = Path(__file__).parents[2]
PORT = 11111
GIB = 1 << 30


def machine(count: int, *, busy: tuple[int, ...] = (), mig: tuple[int, ...] = ()) -> Inventory:
    """A machine whose GPUs are listed backwards, so that taking them as listed is seen to be wrong."""
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:04}-ab",
            pci_bus_id=f"00000000:{0x10 + index:02x}:00.0",
            name="NVIDIA Test",
            memory_used_bytes=30 * GIB if index in busy else 3 << 20,
            memory_total_bytes=80 * GIB,
            utilization_percent=0.0,
            mig=index in mig,
            processes=(GpuProcess(pid=1, user="ada"),) if index in busy else (),
        )
        for index in range(count)
    )
    return Inventory(host="box", time=0.0, cpus=Cpus(), memory=Memory(), gpus=tuple(reversed(gpus)))


def refusal(*nodes: str, has: Mapping[str, Inventory] | None = None, local: LocalFacts = HERE, **tables: str) -> str:
    with pytest.raises(RequestError) as caught:
        plan_for(*nodes, has=has, local=local, **tables)
    message = str(caught.value)
    assert "\n" not in message
    return message


def distributed(words: list[str]) -> str:
    """The flags between ``-m trainer`` and ``--task``."""
    return " ".join(words[words.index("trainer") + 1 : words.index("--task")])


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "first_ranks", "world_size"),
    [
        ([4, 4, 4, 4], [0, 4, 8, 12], 16),
        ([4] * 8, [0, 4, 8, 12, 16, 20, 24, 28], 32),
        ([4, 8], [0, 4], 12),
        ([4, 2, 8, 1], [0, 4, 6, 14], 15),
        ([1, 1], [0, 1], 2),
        ([8], [0], 8),
    ],
)
def test_first_ranks_are_the_sums_of_the_gpus_before(gpus: list[int], first_ranks: list[int], world_size: int) -> None:
    found = plan_for(*remote_nodes(*gpus))
    assert [node.first_rank for node in found.nodes] == first_ranks
    assert found.world_size == world_size
    assert [rank for node in found.nodes for rank in node.ranks] == list(range(world_size))
    assert [len(node.devices) for node in found.nodes] == gpus


@pytest.mark.parametrize(("node", "first_rank"), [(0, 0), (1, 4), (2, 8), (3, 12)])
def test_four_nodes_have_the_flags_of_hetseqs_documentation(node: int, first_rank: int) -> None:
    found = plan_for(*remote_nodes(4, 4, 4, 4), cluster=f"port = {PORT}").nodes[node]
    assert distributed(found.argv) == (
        "--distributed-init-method tcp://10.0.123.1:11111 --distributed-world-size 16 "
        f"--distributed-gpus 4 --distributed-rank {first_rank}"
    )
    assert found.argv[:4] == ["/venv/python", "-P", "-m", "trainer"]
    assert found.argv[found.argv.index("--task") :] == ["--task", "mnist", "--data", "/d"]
    assert found.env == {}


def test_workdir_python_and_env_of_a_node_override_those_of_the_cluster() -> None:
    place = 'workdir = "/code"\npython = "/env/bin/python"\nenv = { NCCL_DEBUG = "INFO", OMP_NUM_THREADS = 4 }'
    own = 'workdir = "~/code"\nsetup = "module load cuda"\nenv = { NCCL_DEBUG = "WARN" }'
    first, second = plan_for(*remote_nodes(1), f"{remote_nodes(1, 1)[1]}\n{own}", cluster=place).nodes
    assert (first.workdir, first.argv[0], first.setup) == ("/code", "/env/bin/python", "")
    assert (second.workdir, second.argv[0], second.setup) == ("~/code", "/env/bin/python", "module load cuda")
    assert {name: first.env[name] for name in ("NCCL_DEBUG", "OMP_NUM_THREADS")} == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
    }
    assert (second.env["NCCL_DEBUG"], second.env["OMP_NUM_THREADS"]) == ("WARN", "4")


@pytest.mark.parametrize(
    ("workdir", "setup", "before"),
    [
        ("", "", "cd '/my folder'"),
        ("", "a", "cd '/my folder' && { a; }"),
        ("/the code", "", "cd '/the code'"),
        ("~/the code", "module load cuda;", "cd ~/'the code' && { module load cuda; }"),
        ("~", "a; b", "cd ~ && { a; b; }"),
    ],
)
def test_a_command_to_type_enters_the_nodes_folder_and_runs_its_setup_first(
    workdir: str, setup: str, before: str
) -> None:
    found = plan_for(*remote_nodes(1))
    node = msgspec.structs.replace(found.nodes[0], workdir=workdir, setup=setup)
    own = msgspec.structs.replace(found, nodes=[node])
    _, command = shell_commands(own, folder="/my folder").split("\n")
    assert command == f"({before} && {shlex.join(found.nodes[0].argv)})"
    login_shell = ["bash", "-lc", f'{before} && exec "$@"', "setup"]
    assert (shlex.join(login_shell) in script(own, name="x")) == bool(workdir), "sbatch starts where it is typed"


@pytest.mark.parametrize(
    ("name", "first_ranks"), [("four_nodes", [0, 4, 8, 12]), ("hetseq_mnist_8x4", [*range(0, 32, 4)])]
)
def test_the_repositorys_plans_have_the_documented_ranks(name: str, first_ranks: list[int]) -> None:
    found = plan(load(str(ROOT / "recipes" / f"{name}.toml")), {}, local=HERE)
    flags = [node.argv[node.argv.index("--distributed-rank") + 1] for node in found.nodes]
    assert flags == [str(rank) for rank in first_ranks]


def test_a_node_with_one_gpu_does_not_spawn_and_has_a_device_id() -> None:
    found = plan_for(*remote_nodes(4, 2, 8, 1)).nodes[3]
    assert distributed(found.argv).endswith(
        "--distributed-gpus 1 --distributed-rank 14 --distributed-no-spawn --device-id 0"
    )
    found = plan_for(*remote_nodes(2), 'host = "10.0.123.9"\ngpus = [3]').nodes[1]
    assert found.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3"}
    assert found.argv[found.argv.index("--device-id") + 1] == "0"


def test_one_gpu_alone_needs_no_rendezvous() -> None:
    found = plan_for("gpus = 1", has={"localhost": machine(2)})
    assert found.init_method is None
    assert distributed(found.nodes[0].argv) == "--distributed-world-size 1 --device-id 0"
    assert found.nodes[0].env["CUDA_VISIBLE_DEVICES"] == "GPU-0000-ab"


def test_one_cpu_rank_alone_is_one_process() -> None:
    assert distributed(plan_for("cpu_ranks = 1").nodes[0].argv) == "--distributed-world-size 1 --cpu"


def test_cpu_ranks_of_this_machine_join_at_a_tested_port() -> None:
    found = plan_for("cpu_ranks = 2")
    assert (found.world_size, found.backend, found.launcher, found.init_method) == (
        2,
        "gloo",
        "local",
        "tcp://127.0.0.1:20123",
    )
    assert found.nodes[0].argv[0] == "/venv/python"
    assert found.nodes[0].devices == ["cpu", "cpu"]
    assert distributed(found.nodes[0].argv) == (
        "--distributed-init-method tcp://127.0.0.1:20123 --distributed-world-size 2 --distributed-gpus 2 --cpu"
    )


@pytest.mark.parametrize(
    "nodes",
    [
        ["cpu_ranks = 3"],
        ["cpu_ranks = 1"],
        ["cpu_ranks = 2", "cpu_ranks = 1"],
        remote_nodes(4, 2, 8, 1),
        remote_nodes(1, 1),
        remote_nodes(3),
    ],
)
@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_the_trainer_starts_exactly_the_planned_ranks(nodes: list[str], scheme: str) -> None:
    if scheme == "env" and nodes == ["cpu_ranks = 1"]:
        return
    found = plan_for(*nodes, cluster='init_method = "env://"' if scheme == "env" else "")
    for node in found.nodes:
        values, _ = read_flags(node.argv[4:], describe(Distributed))
        options = check(Distributed, values, where=str)
        gpus = 0 if "cpu" in node.devices else len(node.devices)
        decision = decide(options, node.env, gpus)
        assert list(decision.ranks) == node.ranks
        assert (decision.world_size, decision.first_rank) == (found.world_size, node.first_rank)
        assert decision.spawn == (len(node.ranks) > 1)
        assert decision.backend == found.backend


# --- where ranks meet ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "cluster", "init_method"),
    [
        (remote_nodes(1, 1), "", f"tcp://10.0.123.1:{DEFAULT_PORT}"),
        (remote_nodes(1, 1), "port = 4000", "tcp://10.0.123.1:4000"),
        (remote_nodes(1, 1), 'init_method = "tcp://master:4000"', "tcp://master:4000"),
        (remote_nodes(1, 1), 'init_method = "file:///shared/meet"', "file:///shared/meet"),
        (remote_nodes(1, 1), 'init_method = "env://"', "env://"),
        (['host = "fd00::7"\ngpus = 1', 'host = "fd00::8"\ngpus = 1'], "", f"tcp://[fd00::7]:{DEFAULT_PORT}"),
        (["cpu_ranks = 2"], "port = 4000", "tcp://127.0.0.1:4000"),
        (["cpu_ranks = 1", "cpu_ranks = 1"], "", "tcp://127.0.0.1:20123"),
        (['host = "localhost"\ncpu_ranks = 1', 'host = "127.0.0.1"\ncpu_ranks = 1'], "", "tcp://127.0.0.1:20123"),
        (['host = "localhost"\ncpu_ranks = 1', 'host = "box"\ncpu_ranks = 1'], "", "tcp://127.0.0.1:20123"),
        (['host = "10.0.0.1"\ncpu_ranks = 1', *remote_nodes(1)], "", f"tcp://10.0.0.1:{DEFAULT_PORT}"),
        (remote_nodes(2), "", f"tcp://127.0.0.1:{DEFAULT_PORT}"),
        (['host = "ada@n1"\ngpus = 1', 'host = "n2"\ngpus = 1'], "", f"tcp://n1:{DEFAULT_PORT}"),
    ],
)
def test_ranks_join_at_an_address_that_all_can_reach(nodes: list[str], cluster: str, init_method: str) -> None:
    found = plan_for(*nodes, cluster=cluster)
    assert found.init_method == init_method
    assert all(node.argv[5] == init_method for node in found.nodes)


@pytest.mark.parametrize(
    ("nodes", "cluster", "finds_port"),
    [
        (["cpu_ranks = 2"], "", True),
        (remote_nodes(1, 1), "", True),
        (remote_nodes(1, 1), "port = 0", True),
        (remote_nodes(1, 1), 'init_method = "env://"', True),
        (remote_nodes(1, 1), "port = 29600", False),
        (remote_nodes(1, 1), 'init_method = "tcp://master:4000"', False),
        (remote_nodes(1, 1), 'init_method = "file:///shared/meet"', False),
        (remote_nodes(1, 1), 'init_method = "env://"\nport = 4000', False),
        (["cpu_ranks = 1"], "", False),
    ],
)
def test_the_launch_finds_a_port_unless_the_recipe_fixes_it_or_none_is_needed(
    nodes: list[str], cluster: str, finds_port: bool
) -> None:
    assert plan_for(*nodes, cluster=cluster).finds_port is finds_port


@pytest.mark.parametrize(
    ("cluster", "init_method"),
    [("", "tcp://10.0.123.1:23456"), ('init_method = "env://"', "env://"), ('init_method = "file:///x"', "file:///x")],
)
def test_the_port_that_the_launch_finds_is_in_the_command_and_the_environment_of_every_node(
    cluster: str, init_method: str
) -> None:
    before = plan_for(*remote_nodes(1, 1), cluster=cluster)
    found = with_rendezvous(before, port=23456)
    assert (found.init_method, {node.argv[5] for node in found.nodes}) == (init_method, {init_method})
    environments = [node.env.get("MASTER_PORT") for node in found.nodes]
    assert environments == ["23456" if init_method == "env://" else None] * 2
    assert rendezvous_port(found) == (None if init_method.startswith("file") else 23456)
    assert str(DEFAULT_PORT) not in msgspec.json.encode(found).decode()


def test_the_arguments_of_a_script_keep_a_word_that_names_the_port() -> None:
    url = f"tcp://127.0.0.1:{HERE.free_port}"
    text = SCRIPT.replace('"--lr"', f'"--distributed-init-method", "{url}"')
    (node,) = with_rendezvous(plan(build(text, name="r.toml"), {}, local=HERE), port=23456).nodes
    assert node.argv.count("tcp://127.0.0.1:23456") == node.argv.count(url) == 1
    assert node.argv.index(url) > node.argv.index("--")


def test_env_gives_the_master_address_in_the_environment() -> None:
    found = plan_for(*remote_nodes(1, 1), cluster='init_method = "env://"\nport = 4000')
    assert [node.env for node in found.nodes] == [{"MASTER_ADDR": "10.0.123.1", "MASTER_PORT": "4000"}] * 2


@pytest.mark.parametrize(
    ("nodes", "cluster", "message"),
    [
        (
            ['host = "localhost"\ngpus = 1', *remote_nodes(1)],
            "",
            "r.toml:4: cluster.nodes[0].host is 'localhost', which the other node 10.0.123.1 cannot reach: "
            "give this machine's address, such as 10.0.0.1",
        ),
        (
            [*remote_nodes(1), 'host = "127.0.0.1"\ngpus = 1'],
            "",
            "cluster.nodes[1].host is '127.0.0.1', which the other node",
        ),
        (
            ["cpu_ranks = 1", *remote_nodes(1)],
            "",
            "cluster.nodes[0].host is missing, but the other node 10.0.123.1 must reach this one: give",
        ),
        (
            remote_nodes(1, 1),
            'init_method = "tcp://localhost:4000"',
            "'tcp://localhost:4000', which the other nodes cannot",
        ),
        (
            remote_nodes(1, 1),
            'init_method = "tcp://127.0.0.1:4000"',
            "'tcp://127.0.0.1:4000', which the other nodes cannot",
        ),
        (["cpu_ranks = 1"], 'init_method = "tcp://a:4000"', "but the run has a single rank, which needs no rendezvous"),
        (
            remote_nodes(1),
            'launcher = "local"',
            "r.toml:2: cluster.launcher is 'local', but 10.0.123.1 is another machine",
        ),
    ],
)
def test_init_methods_that_cannot_work_are_refused(nodes: list[str], cluster: str, message: str) -> None:
    has = {"localhost": machine(2)}
    assert message in refusal(*nodes, cluster=cluster, has=has)


@pytest.mark.parametrize(
    ("nodes", "cluster", "slurm", "launcher"),
    [
        (["cpu_ranks = 1"], "", False, "local"),
        (["cpu_ranks = 1"], "", True, "local"),
        (remote_nodes(1, 1), "", False, "ssh"),
        (remote_nodes(1, 1), "", True, "slurm"),
        (remote_nodes(1, 1), 'launcher = "ssh"', True, "ssh"),
        (["cpu_ranks = 1"], 'launcher = "slurm"', False, "slurm"),
    ],
)
def test_the_launcher_follows_from_the_hosts(nodes: list[str], cluster: str, slurm: bool, launcher: str) -> None:
    local = LocalFacts(names=HERE.names, address=HERE.address, slurm=slurm)
    assert plan_for(*nodes, cluster=cluster, local=local).launcher == launcher


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [
        ("2", "GPU-0000-ab,GPU-0001-ab"),
        ("[3, 1]", "GPU-0001-ab,GPU-0003-ab"),
        ('["GPU-0002"]', "GPU-0002-ab"),
        ('"all"', "GPU-0000-ab,GPU-0001-ab,GPU-0002-ab,GPU-0003-ab"),
        ('"free"', "GPU-0000-ab,GPU-0003-ab"),
    ],
)
def test_gpus_of_a_known_machine_are_passed_by_uuid_in_pci_order(gpus: str, visible: str) -> None:
    found = plan_for(f"gpus = {gpus}", has={"localhost": machine(4, busy=(1, 2))})
    node = found.nodes[0]
    assert node.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    assert node.devices == visible.split(",")
    assert found.backend == "nccl"


def test_this_machine_without_a_cluster_is_all_its_gpus_or_one_cpu_rank() -> None:
    found = build('[train]\ntask = "mnist"\n[task]\ndata = "/d"\n', name="r.toml")
    assert plan(found, {"localhost": machine(3)}, local=HERE).world_size == 3
    alone = plan(found, {"localhost": machine(0)}, local=HERE)
    assert (alone.world_size, alone.nodes[0].devices) == (1, ["cpu"])


def test_ranks_take_gpus_where_there_are_any_and_the_cpu_elsewhere() -> None:
    assert plan_for("ranks = 2", has={"localhost": machine(4)}).nodes[0].devices == ["GPU-0000-ab", "GPU-0001-ab"]
    assert plan_for("ranks = 2", has={"localhost": machine(0)}).nodes[0].devices == ["cpu", "cpu"]


def test_a_count_of_gpus_takes_from_the_environments_visible_devices() -> None:
    local = LocalFacts(cuda_visible_devices="3,GPU-0001")
    found = plan_for("gpus = 2", has={"localhost": machine(4)}, local=local)
    assert found.nodes[0].env["CUDA_VISIBLE_DEVICES"] == "GPU-0001-ab,GPU-0003-ab"


def test_two_nodes_on_one_machine_share_out_its_gpus() -> None:
    found = plan_for("gpus = 2", "gpus = 2", has={"localhost": machine(4)})
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in found.nodes] == [
        "GPU-0000-ab,GPU-0001-ab",
        "GPU-0002-ab,GPU-0003-ab",
    ]
    far = 'host = "10.0.123.1"\n'
    found = plan_for(far + "gpus = [1]", far + "gpus = 2")
    assert [node.devices for node in found.nodes] == [[1], [0, 2]]
    assert found.nodes[1].env["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_ranks_share_a_gpu_only_with_share_devices_and_over_gloo() -> None:
    found = plan_for("gpus = 3", has={"localhost": machine(2)}, train="share_devices = true")
    assert found.nodes[0].devices == ["GPU-0000-ab", "GPU-0001-ab", "GPU-0000-ab"]
    assert found.nodes[0].env["CUDA_VISIBLE_DEVICES"] == "GPU-0000-ab,GPU-0001-ab"
    assert found.backend == "gloo"
    assert "--share-devices" in found.nodes[0].argv


def test_gpus_and_cpus_together_use_gloo_on_every_node() -> None:
    found = plan_for(*remote_nodes(2), 'host = "10.0.123.2"\ncpu_ranks = 2')
    assert found.backend == "gloo"
    assert "--distributed-backend gloo" in distributed(found.nodes[0].argv)
    assert distributed(found.nodes[1].argv).endswith("--distributed-rank 2 --cpu")


@pytest.mark.parametrize(
    ("nodes", "tables", "message"),
    [
        (
            ["gpus = 8"],
            {},
            "r.toml:4: cluster.nodes[0].gpus asks for 8 GPUs, but this machine has 4; train.share_devices",
        ),
        (["gpus = 3", "gpus = 2"], {}, "asks for 2 GPUs, but this machine has 4, 3 of them taken by other nodes"),
        (["gpus = [0, 7]"], {}, "cluster.nodes[0].gpus names GPU 7, but this machine has 0, 1, 2, 3"),
        (["gpus = [1, 1]"], {}, "names GPU GPU-0001-ab twice; train.share_devices = true allows it"),
        (
            ["gpus = [1]", "gpus = [1, 2]"],
            {},
            "names GPU GPU-0001-ab of this machine, which another node of the recipe",
        ),
        (['gpus = "all"', 'gpus = "all"'], {}, 'is "all", but this machine has no GPU left'),
        (['host = "far"\ngpus = [1, 1]'], {}, "names GPU 1 twice"),
        (['host = "far"\ngpus = "free"'], {}, 'cluster.nodes[0].gpus = "free" depends on the GPUs of far'),
        (['host = "far"\ngpus = "all"'], {}, "set gpus to a count or a list of device ids"),
        (['host = "far"\nranks = 2'], {}, "cluster.nodes[0].ranks depends on the GPUs of far, which are not known"),
        (
            [*remote_nodes(1), 'host = "10.0.123.2"\ncpu_ranks = 1'],
            {"cluster": 'backend = "nccl"'},
            "r.toml:2: cluster.backend is 'nccl', but the ranks of node 1 run on the CPU",
        ),
        (
            ["gpus = 5"],
            {"cluster": 'backend = "nccl"', "train": "share_devices = true"},
            "which allows one rank per GPU, but node 0 has more",
        ),
        (
            ["cpu_ranks = 4"],
            {"train": "batch_size = [8, 8, 8]"},
            "r.toml:7: train.batch_size has 3 values, but there are 4 ranks; give one, or one per rank",
        ),
    ],
)
def test_a_plan_beyond_the_machines_is_refused(nodes: list[str], tables: dict[str, str], message: str) -> None:
    assert message in refusal(*nodes, has={"localhost": machine(4)}, **tables)


@pytest.mark.parametrize(
    ("gpus", "has", "message"),
    [
        ("gpus = 2", machine(0), "asks for 2 GPUs, but this machine has no GPU; use cpu_ranks for CPUs"),
        ('gpus = "all"', machine(0), 'is "all", but this machine has no GPU; use cpu_ranks for CPUs'),
        (
            'gpus = "free"',
            machine(2, busy=(0, 1)),
            'is "free", but this machine has no free GPU: all 2 GPUs are in use',
        ),
        ("gpus = [0]", machine(1, mig=(0,)), "is split into MIG instances: name an instance by its UUID"),
        ("gpus = 1", machine(1, mig=(0,)), "no GPU that this command may use"),
    ],
)
def test_each_reason_for_having_no_usable_gpu_has_its_message(gpus: str, has: Inventory, message: str) -> None:
    assert message in refusal(gpus, has={"localhost": has})


def test_a_gpu_that_the_environment_hides_is_named() -> None:
    local = LocalFacts(cuda_visible_devices="0")
    message = refusal("gpus = [1]", has={"localhost": machine(2)}, local=local)
    assert message.endswith("names GPU 1, but CUDA_VISIBLE_DEVICES=0 hides it here")


def test_a_mig_instance_is_believed() -> None:
    found = plan_for('gpus = ["MIG-1234"]', has={"localhost": machine(1, mig=(0,))})
    assert found.nodes[0].env["CUDA_VISIBLE_DEVICES"] == "MIG-1234"


def test_one_batch_size_per_rank_is_passed_on() -> None:
    argv = plan_for(*remote_nodes(1, 2), train="batch_size = [32, 8, 8]").nodes[0].argv
    assert argv[argv.index("--batch-size") + 1] == "32,8,8"


# --- the words of a command ------------------------------------------------------------------------------------------


def test_training_options_of_the_launch_reach_every_node() -> None:
    for node in plan_for(*remote_nodes(1, 1), train='join_timeout = 5\nstart_method = "spawn"\nlr = 0.5').nodes:
        words = " ".join(node.argv)
        assert "--join-timeout 5.0 --start-method spawn --task mnist --lr 0.5 --data /d" in words


def test_task_options_come_back_from_their_flags() -> None:
    options = {"data": "a b", "pattern": ["*.[ch]", "x,y"], "dropout": 0.0, "prompt": "--x", "layers": 2}
    values, rest = read_flags(task_flags(options), describe(LmOptions))
    assert rest == []
    found = check(LmOptions, values, where=str)
    assert (found.data, found.pattern, found.dropout, found.prompt, found.layers) == (
        "a b",
        ("*.[ch]", "x,y"),
        0.0,
        "--x",
        2,
    )


def test_boolean_task_options_are_passed_when_true_and_when_false() -> None:
    assert task_flags({"deep": True, "wide_net": False, "n": None})[:2] == ["--deep", "--no-wide-net"]


def test_a_runs_directory_and_node_are_added_at_the_end() -> None:
    found = with_run_dir(plan_for(*remote_nodes(1, 1)), "/runs/x")
    assert [node.argv[-4:] for node in found.nodes] == [["--run-dir", "/runs/x", "--node", str(i)] for i in range(2)]


def test_a_plan_has_exactly_the_keys_of_the_contract_and_comes_back_from_json() -> None:
    found = plan_for(*remote_nodes(2, 1))
    encoded = msgspec.json.encode(found)
    raw = json.loads(encoded)
    assert list(raw) == ["world_size", "init_method", "backend", "launcher", "nodes", "finds_port"]
    printed = json.loads(msgspec.json.encode(msgspec.structs.replace(found, finds_port=False)))
    assert list(printed) == ["world_size", "init_method", "backend", "launcher", "nodes"]
    assert list(raw["nodes"][0]) == ["node", "host", "first_rank", "ranks", "devices", "argv", "env"]
    assert msgspec.json.decode(encoded, type=Plan) == found


SCRIPT = (
    '[[cluster.nodes]]\ncpu_ranks = 2\n[train]\nscript = "train.py"\nargs = ["--lr", "1"]\nstart_method = "spawn"\n'
)


def test_planning_a_thousand_nodes_costs_less_than_reading_their_recipe() -> None:
    nodes = remote_nodes(*[8] * 1000)
    reading_s, planning_s = [], []
    for _ in range(3):
        begin = time.perf_counter()
        wanted = recipe(*nodes, cluster='init_method = "tcp://10.0.123.1:29600"')
        read = time.perf_counter()
        assert plan(wanted, {}, local=HERE).world_size == 8000
        reading_s.append(read - begin)
        planning_s.append(time.perf_counter() - read)
    assert min(planning_s) < min(reading_s)


@pytest.mark.parametrize(("more", "flags"), [("", ()), ("instrument = false\n", ("--no-instrument",))])
def test_a_script_is_planned_like_a_task_with_its_arguments_last(more: str, flags: tuple[str, ...]) -> None:
    found = with_run_dir(plan(build(SCRIPT + more, name="r.toml"), {}, local=HERE), "/runs/x")
    (node,) = found.nodes
    at = node.argv.index("--start-method")
    assert node.argv[at:] == [
        *("--start-method", "spawn", "--script", "train.py", *flags),
        *("--run-dir", "/runs/x", "--node", "0", "--", "--lr", "1"),
    ]


def test_a_script_cannot_use_a_file_url() -> None:
    text = '[cluster]\ninit_method = "file:///shared/x"\n' + SCRIPT
    with pytest.raises(RequestError, match=r"r.toml:2: cluster.init_method is .* a script's ranks meet at MASTER_ADDR"):
        plan(build(text, name="r.toml"), {}, local=HERE)


def test_a_failed_script_is_started_again_at_a_new_port_and_finds_its_checkpoint_itself(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "own.pt").touch()
    before = plan(build(SCRIPT, name="r.toml"), {}, local=HERE)
    after = next_plan(before, run_dir, restarts=1)
    assert after.init_method != before.init_method
    (old,), (new,) = before.nodes, after.nodes
    assert [word for word in new.argv if word not in old.argv] == [after.init_method]


# --- Slurm -----------------------------------------------------------------------------------------------------------


def test_uneven_nodes_are_named_and_request_their_own_gpus() -> None:
    text = script(plan_for(*named_nodes(4, 2, 1)), name="x")
    assert "#SBATCH --nodelist=n1,n2,n3" in text
    assert "#SBATCH --gpus-per-node" not in text
    for index, count in enumerate((4, 2, 1)):
        assert f"--nodelist=n{index + 1} --cpu-bind=none --gpus={count} /venv/python" in text


def test_nodes_without_names_come_from_the_allocation() -> None:
    text = script(plan_for(*remote_nodes(2, 2)), name="x")
    assert f'tcp://"${{nodes[0]}}":{DEFAULT_PORT}' in text
    assert "10.0.123.1" not in text


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(remote_nodes(2, 1), "needs Slurm's node names"), (named_nodes(1)[:1] * 2, "same host")],
)
def test_plans_that_a_batch_script_cannot_express_are_refused(nodes: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        script(plan_for(*nodes), name="x")


# --- this machine ----------------------------------------------------------------------------------------------------


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port(random.Random(3))
    with socket.socket() as server:
        server.bind(("", port))
        server.listen()
        assert not is_port_free(port)
        assert free_port(random.Random(3)) != port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_who_holds_a_busy_port_is_named(address: str) -> None:
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        assert port_holder(server.getsockname()[1]).endswith(f"(pid {os.getpid()})")


def test_this_machine_knows_itself_by_name_and_address() -> None:
    facts = local_facts([socket.gethostname()])
    assert socket.gethostname().lower() in facts.names
    assert "127.0.0.1" in own_addresses()
    assert facts.python == sys.executable
    assert local_facts([None, "localhost"]).address == ""
