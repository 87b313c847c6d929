"""A run without lost hosts: the plan of the next attempt, and what a recipe may set ``min_ranks`` to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plans import HERE, plan_for, recipe

from gputrain_tui.plan.fewer_hosts import describe_fewer, plan_without, recipe_without
from gputrain_tui.plan.planner import Plan, plan, with_run_dir
from gputrain_tui.recipe.build import build
from trainer.contract.errors import RequestError

CLUSTER = "min_ranks = 1\nmax_restarts = 1"


def nodes(*ranks: str) -> list[str]:
    return [f'host = "n{index + 1}"\n{rank}' for index, rank in enumerate(ranks)]


def without(wanted: Any, *lost: str) -> tuple[Plan, Plan]:
    """Return the plan of a recipe as a run has it, and that without lost hosts."""
    before = with_run_dir(plan(wanted, {}, local=HERE), "/run")
    fewer = recipe_without(wanted, before, lost)
    return before, plan_without(before, fewer, run_dir="/run", local=HERE)


def value(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


@pytest.mark.parametrize(
    ("lost", "hosts", "ranks"),
    [
        (["n3"], ["n1", "n2"], [[0, 1], [2]]),
        (["n1"], ["n2", "n3"], [[0], [1, 2, 3]]),
        (["n2"], ["n1", "n3"], [[0, 1], [2, 3, 4]]),
        (["n1", "n2"], ["n3"], [[0, 1, 2]]),
        (["n3", "n1"], ["n2"], [[0]]),
    ],
)
def test_ranks_and_nodes_are_numbered_anew_in_the_order_of_the_recipe(
    lost: list[str], hosts: list[str], ranks: list[list[int]]
) -> None:
    wanted = recipe(*nodes("cpu_ranks = 2", 'cpu_ranks = 1\nenv = { A = "1" }', "cpu_ranks = 3"), cluster=CLUSTER)
    _, after = without(wanted, *lost)
    assert [(node.node, node.host, node.ranks, node.first_rank) for node in after.nodes] == [
        (index, host, own, own[0]) for index, (host, own) in enumerate(zip(hosts, ranks, strict=True))
    ]
    world_size = sum(map(len, ranks))
    assert (after.world_size, after.launcher) == (world_size, "ssh")
    for node in after.nodes:
        assert value(node.argv, "--distributed-world-size") == str(world_size)
        assert value(node.argv, "--distributed-rank") == (None if len(hosts) == 1 else str(node.first_rank))
        assert (value(node.argv, "--run-dir"), value(node.argv, "--node")) == ("/run", str(node.node))
        assert node.env.get("A") == ("1" if node.host == "n2" else None)


def test_a_plan_without_a_host_is_that_of_a_recipe_without_it() -> None:
    rows = nodes("cpu_ranks = 2", "gpus = 2", "gpus = [1, 3]", "cpu_ranks = 1")
    _, after = without(recipe(*rows, cluster=CLUSTER), "n4")
    assert after == with_run_dir(plan(recipe(*rows[:3], cluster=CLUSTER), {}, local=HERE), "/run")


@pytest.mark.parametrize(
    ("method", "lost", "meets"),
    [
        ("auto", "n1", "tcp://n2:29600"),
        ("auto", "n3", "tcp://n1:29600"),
        ("tcp://10.9.9.1:2950", "n1", "tcp://n2:2950"),
        ("tcp://10.9.9.1:2950", "n2", "tcp://10.9.9.1:2950"),
        ("file:///nfs/meet", "n1", "file:///nfs/meet"),
    ],
)
def test_the_ranks_meet_at_the_first_host_that_is_left(method: str, lost: str, meets: str) -> None:
    rows = nodes("cpu_ranks = 1", "cpu_ranks = 1", "cpu_ranks = 1")
    before, after = without(recipe(*rows, cluster=f'{CLUSTER}\ninit_method = "{method}"'), lost)
    assert after.init_method == meets
    assert after.finds_port == before.finds_port == (method == "auto")
    assert {value(node.argv, "--distributed-init-method") for node in after.nodes} == {meets}


def test_a_script_of_env_meets_there_as_well() -> None:
    rows = nodes("cpu_ranks = 1", "cpu_ranks = 1", "cpu_ranks = 2")
    _, after = without(recipe(*rows, cluster=f'{CLUSTER}\ninit_method = "env://"\nport = 2950'), "n1")
    assert [(node.env["MASTER_ADDR"], node.env["MASTER_PORT"]) for node in after.nodes] == [("n2", "2950")] * 2


def test_a_script_gets_the_new_number_of_nodes_and_no_batch_is_named() -> None:
    rows = "".join(f"[[cluster.nodes]]\n{row}\n" for row in nodes("cpu_ranks = 1", "cpu_ranks = 1", "cpu_ranks = 2"))
    wanted = build(f'[cluster]\n{CLUSTER}\n{rows}[train]\nscript = "/w/train.py"\n', name="r.toml")
    before, after = without(wanted, "n1")
    assert [node.env["GROUP_WORLD_SIZE"] for node in after.nodes] == ["2", "2"]
    assert describe_fewer(before, after, wanted, ["n1"]) == "the run goes on without n1, with 3 of 4 ranks"


def test_one_rank_that_is_left_needs_no_rendezvous() -> None:
    _, after = without(recipe(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=CLUSTER), "n1")
    assert (after.init_method, after.world_size) == (None, 1)
    assert value(after.nodes[0].argv, "--distributed-init-method") is None


def test_hosts_that_are_left_keep_their_devices() -> None:
    before, after = without(recipe(*nodes("gpus = 2", "gpus = 1", "gpus = [2, 3]"), cluster=CLUSTER), "n2")
    for old, new in zip((before.nodes[0], before.nodes[2]), after.nodes, strict=True):
        assert (new.devices, new.env) == (old.devices, old.env)
    assert after.backend == before.backend == "nccl"


def test_each_rank_keeps_its_batch_size() -> None:
    rows = nodes("cpu_ranks = 2", "cpu_ranks = 1", "cpu_ranks = 1")
    for sizes, kept in (("[1, 2, 3, 4]", "1,2,4"), ("[7]", "7")):
        _, after = without(recipe(*rows, cluster=CLUSTER, train=f"batch_size = {sizes}"), "n2")
        assert {value(node.argv, "--batch-size") for node in after.nodes} == {kept}


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ("batch_size = 4", ": 12 instead of 16 samples per step, the same learning rate"),
        ("batch_size = [1, 2, 3, 4]", ": 7 instead of 10 samples per step, the same learning rate"),
        ("batch_size = 4\nupdate_freq = 2", ": 24 instead of 32 samples per step, the same learning rate"),
        ("batch_size = 4\nupdate_freq = [1, 2]", ": 12 instead of 16 samples per micro-step, the same learning rate"),
        ("", ", each with its batch size, and the same learning rate"),
    ],
)
def test_the_change_of_the_global_batch_is_named(train: str, text: str) -> None:
    wanted = recipe(*nodes("cpu_ranks = 2", "cpu_ranks = 1", "cpu_ranks = 1"), cluster=CLUSTER, train=train)
    before, after = without(wanted, "n2")
    assert describe_fewer(before, after, wanted, ["n2"]) == f"the run goes on without n2, with 3 of 4 ranks{text}"


@pytest.mark.parametrize(
    ("least", "lost", "message"),
    [
        ("min_ranks = 3", ["n1"], "2 of 4 ranks are left, but cluster.min_ranks is 3"),
        ("min_ranks = 1", ["n3", "n1", "n2"], "0 of 4 ranks are left, but cluster.min_ranks is 1"),
    ],
)
def test_too_few_ranks_are_refused(least: str, lost: list[str], message: str) -> None:
    rows = nodes("cpu_ranks = 2", "cpu_ranks = 1", "cpu_ranks = 1")
    with pytest.raises(RequestError) as caught:
        without(recipe(*rows, cluster=f"{least}\nmax_restarts = 1"), *lost)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("min_ranks = 3\nmax_restarts = 1", "r.toml:2: cluster.min_ranks is 3, but the run has 2 ranks: give 1 to 2"),
        ("min_ranks = 0\nmax_restarts = 1", "cluster.min_ranks is 0, but must be an integer >= 1"),
        ("min_ranks = -1\nmax_restarts = 1", "cluster.min_ranks is -1, but must be an integer >= 1"),
        ('min_ranks = "2"\nmax_restarts = 1', "cluster.min_ranks is '2', but must be an integer"),
        ("min_rank = 1\nmax_restarts = 1", "cluster.min_rank is not known; did you mean 'min_ranks'?"),
        ("min_ranks = 1", "cluster.min_ranks is used at a restart, but cluster.max_restarts is 0: set it to 1 or more"),
        (
            'min_ranks = 1\nlauncher = "slurm"',
            'cluster.min_ranks needs cluster.launcher = "ssh", but it is "slurm": change it, or remove min_ranks',
        ),
    ],
)
def test_a_minimum_that_cannot_hold_is_refused_in_one_line(cluster: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_for(*nodes("cpu_ranks = 1", "cpu_ranks = 1"), cluster=cluster)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_on_this_machine_or_in_an_allocation_loses_no_host() -> None:
    with pytest.raises(RequestError, match=r"cluster\.min_ranks needs nodes on other hosts, started over ssh"):
        plan_for("cpu_ranks = 2", cluster=CLUSTER)
    with pytest.raises(RequestError, match=r"cluster\.min_ranks needs nodes on other hosts"):
        plan_for(*nodes("cpu_ranks = 1"), cluster=CLUSTER, local=dataclasses.replace(HERE, slurm=True))
