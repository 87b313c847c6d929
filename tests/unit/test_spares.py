"""A spare host in the place of a lost one: the plan of the next attempt, and what a recipe may name as spare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from plans import HERE, plan_for, recipe

from gputrain_tui.hosts.inventory import Gpu, Inventory
from gputrain_tui.lifecycle.spare_hosts import SpareHosts
from gputrain_tui.plan.planner import plan
from gputrain_tui.plan.spares import plan_on, recipe_on
from gputrain_tui.recipe.model import ClusterOptions
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir
from trainer.host.cores import Cpus
from trainer.host.memory import Memory

CLUSTER = 'spare = ["n9"]\nmax_restarts = 1'


def with_gpus(count: int) -> Inventory:
    gpus = tuple(
        Gpu(
            index=index, uuid=f"GPU-{index}", pci_bus_id=f"0000:{index:02x}", name="Test", memory_used_bytes=0,
            memory_total_bytes=1 << 36, utilization_percent=0.0,
        )
        for index in range(count)
    )  # fmt: skip
    return Inventory(host="n9", time=0.0, cpus=Cpus(), memory=Memory(), gpus=gpus)


def nodes(*ranks: str) -> list[str]:
    return [f'host = "n{index + 1}"\n{rank}' for index, rank in enumerate(ranks)]


def on_spare(wanted: Any, lost: str, inventory: Inventory | None = None) -> tuple[Any, Any]:
    """Return the plan of a recipe, and that with n9 in the place of a lost host."""
    before = plan(wanted, {}, local=HERE)
    return before, plan_on(before, recipe_on(wanted, lost, "n9"), lost, "n9", inventory=inventory, local=HERE)


def test_a_spare_gets_the_ranks_and_the_command_of_the_lost_host_and_the_others_keep_theirs() -> None:
    wanted = recipe(*nodes("cpu_ranks = 2", 'cpu_ranks = 1\nenv = { A = "1" }', "cpu_ranks = 3"), cluster=CLUSTER)
    before, after = on_spare(wanted, "n2")
    assert [node.host for node in after.nodes] == ["n1", "n9", "n3"]
    assert (after.init_method, after.world_size) == (before.init_method, 6)
    for old, new in zip(before.nodes, after.nodes, strict=True):
        assert (new.ranks, new.argv, new.env, new.devices) == (old.ranks, old.argv, old.env, old.devices)


def test_the_ranks_meet_at_the_spare_where_the_first_host_was_lost() -> None:
    wanted = recipe(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=CLUSTER + "\nport = 2950")
    assert on_spare(wanted, "n1")[1].init_method == "tcp://n9:2950"


def test_a_script_of_env_meets_at_the_spare_as_well() -> None:
    wanted = recipe(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=CLUSTER + '\ninit_method = "env://"\nport = 2950')
    before, after = on_spare(wanted, "n1")
    assert after.init_method == before.init_method == "env://"
    assert [node.env["MASTER_ADDR"] for node in after.nodes] == ["n9", "n9"]


def test_a_spare_gives_gpus_of_its_own() -> None:
    wanted = recipe(*nodes("gpus = 2", "gpus = 2"), cluster=CLUSTER)
    _, after = on_spare(wanted, "n2", with_gpus(3))
    assert after.nodes[1].devices == ["GPU-0", "GPU-1"]
    assert after.nodes[1].env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    listed = recipe(*nodes("gpus = 2", "gpus = [0, 2]"), cluster=CLUSTER)
    assert on_spare(listed, "n2", with_gpus(3))[1].nodes[1].devices == ["GPU-0", "GPU-2"]


@pytest.mark.parametrize(
    ("gpus", "has", "message"),
    [
        ("gpus = 2", 1, "asks for 2 GPUs, but n9 has 1"),
        ("gpus = [0, 2]", 2, "names GPU 2, but n9 has 0, 1"),
        ('gpus = "all"', 3, "it has GPU GPU-0, GPU-1, GPU-2, but its ranks need GPU GPU-0, GPU-1"),
        ("ranks = 2", 0, "it has CPU × 2, but its ranks need GPU GPU-0, GPU-1"),
    ],
)
def test_a_spare_without_the_devices_is_refused(gpus: str, has: int, message: str) -> None:
    wanted = recipe(*nodes("gpus = 2", gpus), cluster=CLUSTER)
    before = plan(wanted, {"n2": with_gpus(4 if "[" in gpus else 2)}, local=HERE)
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        plan_on(before, recipe_on(wanted, "n2", "n9"), "n2", "n9", inventory=with_gpus(has), local=HERE)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ('spare = ["n2"]\nmax_restarts = 1', "r.toml:2: cluster.spare has 'n2', which is a node: name a host once"),
        ('spare = ["n9", "n9"]\nmax_restarts = 1', "cluster.spare has 'n9', which is named twice: name a host once"),
        ('spare = ["-x"]\nmax_restarts = 1', "cluster.spare has '-x', but each must be a host name or an address"),
        ('spare = ["n9"]', "cluster.spare is used at a restart, but cluster.max_restarts is 0: set it to 1 or more"),
        ('spare = ["n9"]\nlauncher = "slurm"', 'cluster.spare needs cluster.launcher = "ssh", but it is "slurm"'),
        ('spare = ["me@n2"]\nmax_restarts = 1', "cluster.spare has 'me@n2', which is a node: name a host once"),
        ('spare = ["localhost"]\nmax_restarts = 1', "cluster.spare has 'localhost', which is this machine"),
    ],
)
def test_a_host_that_cannot_be_a_spare_is_refused_in_one_line(cluster: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_for(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=cluster)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_on_this_machine_has_no_spare_hosts() -> None:
    with pytest.raises(RequestError, match=r"cluster\.spare needs nodes on other hosts, started over ssh"):
        plan_for("cpu_ranks = 2", cluster=CLUSTER)
    with pytest.raises(RequestError, match=r"cluster\.spare needs nodes on other hosts"):
        plan_for(*nodes("cpu_ranks = 1"), cluster=CLUSTER, local=dataclasses.replace(HERE, slurm=True))


def test_a_run_that_is_on_a_spare_gets_no_other_host_once_its_supervisor_was_killed(tmp_path: Path) -> None:
    wanted = recipe(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=CLUSTER)
    text = "".join(f"[[cluster.nodes]]\n{node}\n" for node in nodes("cpu_ranks = 1", "cpu_ranks = 1"))
    (tmp_path / "recipe.toml").write_text(f'[cluster]\n{CLUSTER}\n{text}[train]\ntask = "mnist"\n[task]\ndata = "/d"\n')
    _, after = on_spare(wanted, "n2")
    with pytest.raises(RequestError, match="n1 is down; the run is no longer on the hosts of its recipe"):
        SpareHosts(RunDir(tmp_path), ClusterOptions(spare=("n9",), max_restarts=1)).replace(after, {"n1": "n1 is down"})
