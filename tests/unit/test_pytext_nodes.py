"""PyText's world size beside nodes: its tutorial has 40 GPUs on servers of 8, which are 5 servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plans import HERE

from gputrain_tui.plan.planner import plan
from gputrain_tui.recipe.build import build
from trainer.contract.errors import RequestError

HOSTS = [f"10.0.0.{number}" for number in range(1, 6)]


def configuration(**changes: Any) -> str:
    data = {"columns_to_read": ["text", "doc_label"], "train_path": "t.tsv"}
    task = {"DocClassificationTask": {"data_handler": data}}
    return json.dumps({"config": {"task": task, "distributed_world_size": 40, **changes}}, indent=1)


def node_table(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"cluster": {"nodes": list(nodes)}}


def setting(*nodes: dict[str, Any]) -> str:
    tables = ", ".join(
        "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in node.items()) + "}" for node in nodes
    )
    return f"cluster.nodes=[{tables}]"


def counts(text: str, *settings: str) -> list[int]:
    found = plan(build(text, name="r.json", overrides=settings), {}, local=HERE)
    assert found.world_size == sum(len(node.ranks) for node in found.nodes)
    return [len(node.ranks) for node in found.nodes]


def refusal(text: str, *settings: str) -> str:
    with pytest.raises(RequestError) as refused:
        counts(text, *settings)
    return str(refused.value)


@pytest.mark.parametrize("given", ["with their GPUs", "by name alone"])
def test_forty_gpus_on_five_servers_are_eight_on_each(given: str) -> None:
    nodes = [{"host": host} if given == "by name alone" else {"host": host, "gpus": 8} for host in HOSTS]
    assert counts(configuration(**node_table(*nodes))) == [8] * 5
    assert counts(configuration(), setting(*nodes)) == [8] * 5
    assert counts(configuration(), f"config.{setting(*nodes)}") == [8] * 5


def test_servers_may_be_uneven_if_their_ranks_are_the_world_size() -> None:
    uneven = [{"host": HOSTS[0], "gpus": 16}, {"host": HOSTS[1], "gpus": 16}, {"host": HOSTS[2], "gpus": 8}]
    assert counts(configuration(**node_table(*uneven))) == [16, 16, 8]


def test_ranks_on_cpus_are_shared_as_well() -> None:
    text = configuration(use_cuda_if_available=False, **node_table({"host": HOSTS[0]}, {"host": HOSTS[1]}))
    assert [node.devices for node in plan(build(text, name="r.json"), {}, local=HERE).nodes] == [["cpu"] * 20] * 2


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (
            configuration(**node_table(*({"host": host, "gpus": 16} for host in HOSTS[:2]))),
            [],
            "config.distributed_world_size is 40, but cluster.nodes has 16 + 16 = 32 ranks: give the nodes 40",
        ),
        (
            configuration(),
            [setting(*({"host": host, "gpus": 16} for host in HOSTS[:3]))],
            "config.distributed_world_size is 40, but cluster.nodes has 16 + 16 + 16 = 48 ranks: give",
        ),
        (
            configuration(),
            ["config.distributed_world_size=32", setting({"host": HOSTS[0], "gpus": 8}, {"host": HOSTS[1], "gpus": 8})],
            "--set config.distributed_world_size is 32, but cluster.nodes has 8 + 8 = 16 ranks",
        ),
        (
            configuration(**node_table({"host": HOSTS[0]}, {"host": HOSTS[1]}, {"host": HOSTS[2]})),
            [],
            "config.distributed_world_size is 40, which 3 nodes cannot share equally: give each of cluster.nodes its",
        ),
        (
            configuration(distributed_world_size="40", **node_table({"host": HOSTS[0], "gpus": 8})),
            [],
            "config.distributed_world_size is '40', but must be an integer >= 1",
        ),
    ],
)
def test_a_world_size_that_the_nodes_do_not_have_is_refused_and_not_dropped(
    text: str, settings: list[str], message: str
) -> None:
    assert message in refusal(text, *settings)


def test_the_ranks_of_this_machine_are_still_changed_by_their_key() -> None:
    assert counts(configuration(use_cuda_if_available=False), "cluster.nodes.0.cpu_ranks=2") == [2]
