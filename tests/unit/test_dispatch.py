from __future__ import annotations

from typing import Any

import pytest

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.environments.decision import Decision, apply_counts
from trainer.environments.dispatch import decide
from trainer.environments.slurm_step import expand, task_counts

TCP = "tcp://10.0.0.1:29500"
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "24", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}


def options(**values: Any) -> Distributed:
    """Flags by their names without the ``distributed_`` that most of them have."""
    known = set(Distributed.__struct_fields__)
    return Distributed(**{name if name in known else f"distributed_{name}": value for name, value in values.items()})


def slurm(**values: Any) -> dict[str, str]:
    return STEP | {f"SLURM_{name}": str(value) for name, value in values.items()}


def brief(decision: Decision) -> tuple[str, int, tuple[int, ...], tuple[int | None, ...], bool]:
    return decision.mode, decision.world_size, decision.ranks, decision.device_ids, decision.spawn


# --- the nodes of a cluster (A16) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(
    ("gpus", "firsts", "world"),
    [
        ([4, 4, 4, 4], [0, 4, 8, 12], 16),
        ([4] * 8, [0, 4, 8, 12, 16, 20, 24, 28], 32),
        ([4, 8], [0, 4], 12),
        ([4, 2, 8, 1], [0, 4, 6, 14], 15),
    ],
)
def test_every_node_starts_its_own_ranks_at_its_offset(
    gpus: list[int], firsts: list[int], world: int, cpu: bool
) -> None:
    started: list[int] = []
    for here, first in zip(gpus, firsts, strict=True):
        decision = decide(options(init_method=TCP, world_size=world, gpus=here, rank=first, cpu=cpu), {}, here)
        assert (decision.mode, decision.world_size, decision.first_rank) == ("explicit", world, first)
        assert decision.spawn == (here > 1)
        assert decision.init_method == TCP
        assert decision.backend == ("gloo" if cpu else "nccl")
        assert decision.device_ids == ((None,) * here if cpu else tuple(range(here)))
        assert (decision.local_ranks, decision.local_world_size) == (tuple(range(here)), here)
        started += decision.ranks
    assert started == list(range(world))


def test_a_node_with_one_gpu_does_not_spawn_and_honours_its_device_id() -> None:
    decision = decide(options(init_method=TCP, world_size=15, gpus=1, rank=14, device_id=3), {}, 4)
    assert brief(decision) == ("explicit", 15, (14,), (3,), False)


def test_no_spawn_makes_the_given_rank_this_process() -> None:
    decision = decide(
        options(init_method=TCP, world_size=8, gpus=4, rank=6, no_spawn=True, device_id=2), {"LOCAL_RANK": "2"}, 4
    )
    assert brief(decision) == ("explicit", 8, (6,), (2,), False)
    assert (decision.local_ranks, decision.local_world_size) == ((2,), 4)


def test_without_a_count_a_node_takes_its_devices_but_no_more_than_the_world_has_left() -> None:
    assert decide(options(init_method=TCP, world_size=8), {}, 4).ranks == (0, 1, 2, 3)
    assert decide(options(init_method=TCP, world_size=6, rank=4), {}, 4).ranks == (4, 5)
    assert decide(options(init_method=TCP), {}, 4).world_size == 4
    assert decide(options(init_method=TCP, world_size=2, rank=1, cpu=True), {}, 0).ranks == (1,)


@pytest.mark.parametrize("url", ["file:///shared/rendezvous", "tcp://[::1]:29500", "tcp://head.example.org:1"])
def test_init_methods_pass_through_unchanged(url: str) -> None:
    assert decide(options(init_method=url, world_size=4, gpus=2), {}, 2).init_method == url


def test_env_url_without_ranks_takes_the_ranks_of_the_flags() -> None:
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    decision = decide(options(init_method="env://", world_size=4, gpus=2, rank=2), environ, 2)
    assert brief(decision) == ("explicit", 4, (2, 3), (0, 1), True)
    assert decision.init_method == TCP


@pytest.mark.parametrize(
    ("flags", "devices", "fragment"),
    [
        ({"world_size": 4, "gpus": 4}, 2, "4 ranks were asked for on this node, but it has 2 GPUs"),
        ({"world_size": 4, "gpus": 2, "rank": 3}, 2, "ranks 3 to 4 would start here, but the world size is 4"),
        ({"world_size": 4, "rank": 4, "gpus": 1}, 2, "--distributed-rank is 4, but with a world size of 4"),
        ({"world_size": 1}, 1, "the world size is 1"),
        ({}, 1, "the world size is 1"),
        ({"world_size": 4, "gpus": 2}, 0, "add --cpu"),
        ({}, 0, "needs --distributed-world-size"),
        ({"cpu": True}, 0, "needs --distributed-world-size"),
        ({"cpu": True, "world_size": 4}, 0, "--distributed-gpus is missing"),
        ({"cpu": True, "world_size": 2, "gpus": 2, "backend": "nccl"}, 0, "nccl needs GPUs"),
        ({"world_size": 4, "gpus": 4, "share_devices": True, "backend": "nccl"}, 2, "refuses two ranks on one GPU"),
        ({"world_size": 4, "gpus": 4, "device_id": 0}, 4, "--device-id is for one rank"),
        ({"world_size": 4, "gpus": 1, "device_id": 4}, 4, "--device-id is 4, but the GPUs here are 0 to 3"),
        ({"world_size": 4, "gpus": 2, "port": 12345}, 2, "--distributed-port 12345 contradicts"),
    ],
)
def test_requests_with_an_init_method_that_cannot_be_met_are_refused(
    flags: dict[str, Any], devices: int, fragment: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decide(options(init_method=TCP, **flags), {}, devices)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:29500",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:99999",
        "tcp://10.0.0.1:port",
        "tcp://:29500",
        "tcp://[::1:29500",
        "file://relative/path",
        "file:///",
        "http://10.0.0.1:80",
        "",
    ],
)
def test_malformed_init_methods_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--distributed-init-method is"):
        decide(options(init_method=url, world_size=4, gpus=2), {}, 2)


# --- a launcher's environment ---------------------------------------------------------------------------------------


def test_a_launchers_rank_never_spawns_again() -> None:
    decision = decide(options(), TORCHRUN, 4)
    assert brief(decision) == ("environment", 8, (5,), (1,), False)
    assert (decision.init_method, decision.local_world_size) == ("env://", 4)


def test_a_launcher_on_cpus_gives_gloo_ranks() -> None:
    decision = decide(options(cpu=True), TORCHRUN, 4)
    assert brief(decision) == ("environment", 8, (5,), (None,), False)
    assert decision.backend == "gloo"


def test_a_launcher_with_one_rank_needs_no_rendezvous() -> None:
    environ = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert decide(options(), environ, 0).init_method is None
    assert decide(options(init_method="env://"), environ, 0).mode == "environment"


def test_the_environment_of_a_launcher_comes_before_slurm_and_an_init_method_before_both() -> None:
    environ = TORCHRUN | slurm(NODEID=1, NTASKS=2, NTASKS_PER_NODE=1)
    assert decide(options(), environ, 4).mode == "environment"
    assert decide(options(init_method=TCP, world_size=8), environ, 4).mode == "explicit"


@pytest.mark.parametrize(
    ("flags", "environ", "devices", "device"),
    [
        ({}, {}, 4, 1),
        ({"device_id": 1}, {}, 4, 1),
        ({}, {"LOCAL_RANK": ""}, 4, 1),
        ({"device_id": 3}, {"LOCAL_RANK": ""}, 4, 3),
        ({}, {"CUDA_VISIBLE_DEVICES": "GPU-1234", "TORCHELASTIC_RUN_ID": ""}, 1, 0),
        ({"share_devices": True}, {}, 1, 0),
    ],
)
def test_a_launchers_rank_finds_its_own_gpu(
    flags: dict[str, Any], environ: dict[str, str], devices: int, device: int
) -> None:
    assert decide(options(**flags), TORCHRUN | environ, devices).device_ids == (device,)


@pytest.mark.parametrize(
    ("flags", "environ", "devices", "fragment"),
    [
        ({"world_size": 4}, {}, 4, "--distributed-world-size is 4, but the launcher's WORLD_SIZE is 8"),
        ({"rank": 4}, {}, 4, "--distributed-rank is 4, but the launcher's RANK is 5"),
        ({"gpus": 2}, {}, 4, "--distributed-gpus is 2, but the launcher's LOCAL_WORLD_SIZE is 4"),
        ({"device_id": 0}, {}, 4, "several ranks would use one GPU"),
        ({}, {}, 2, "local rank 1 of 4 on this node, but it has 2 GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0"}, 1, "but it has 1 GPU visible"),
        ({}, {}, 0, "add --cpu"),
        ({}, {"RANK": "8"}, 4, "RANK is 8, but with WORLD_SIZE 8 ranks are 0 to 7"),
        ({}, {"RANK": "five"}, 4, "RANK is 'five', but must be an integer"),
        ({}, {"MASTER_PORT": "70000"}, 4, "MASTER_PORT is 70000"),
        ({}, {"MASTER_ADDR": ""}, 4, "no MASTER_ADDR"),
        ({"init_method": "env://"}, {"RANK": "", "MASTER_PORT": ""}, 4, "no MASTER_PORT"),
    ],
)
def test_a_launchers_environment_that_contradicts_is_refused(
    flags: dict[str, Any], environ: dict[str, str], devices: int, fragment: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decide(options(**flags), TORCHRUN | environ, devices)
    assert fragment in str(caught.value)


# --- Slurm (A17) ----------------------------------------------------------------------------------------------------


def test_one_task_per_node_spawns_the_nodes_gpus_and_exchanges_counts() -> None:
    decision = decide(options(), slurm(NODEID=1, NTASKS_PER_NODE=1, NTASKS=2), 8)
    assert brief(decision) == ("slurm", 16, tuple(range(8, 16)), tuple(range(8)), True)
    assert decision.exchange is not None
    assert (decision.exchange.node, decision.exchange.nodes, decision.exchange.host) == (1, 2, "n1")


@pytest.mark.parametrize("known", [{"gpus": 8}, {"gpus": 8, "world_size": 16}])
def test_a_count_per_node_makes_the_exchange_needless(known: dict[str, Any]) -> None:
    decision = decide(options(**known), slurm(NODEID=1, TASKS_PER_NODE="1(x2)"), 8)
    assert (decision.world_size, decision.first_rank, decision.exchange) == (16, 8, None)


def test_gpus_per_node_of_slurm_make_the_exchange_needless() -> None:
    environ = slurm(NODEID=1, TASKS_PER_NODE="1(x2)", GPUS_PER_NODE="h200:8")
    assert decide(options(), environ, 8).exchange is None


def test_exchanged_counts_give_uneven_nodes_their_true_ranks() -> None:
    environ = slurm(NODEID=2, NNODES=4, NTASKS=4, STEP_TASKS_PER_NODE="1(x4)")
    decision = apply_counts(decide(options(), environ, 8), [4, 2, 8, 1])
    assert (decision.world_size, decision.ranks, decision.exchange) == (15, tuple(range(6, 14)), None)
    with pytest.raises(RequestError, match=r"is 32, but the nodes have 4 \+ 2 \+ 8 \+ 1 = 15 ranks"):
        apply_counts(decide(options(world_size=32), environ, 8), [4, 2, 8, 1])


def test_one_task_per_gpu_is_a_rank_without_spawning() -> None:
    environ = slurm(NTASKS_PER_NODE=8, PROCID=11, LOCALID=3, NODEID=1)
    decision = decide(options(world_size=16), environ, 8)
    assert brief(decision) == ("slurm", 16, (11,), (3,), False)
    assert decision.local_world_size == 8
    with pytest.raises(RequestError, match="--distributed-world-size is 32, but each of the 16 tasks"):
        decide(options(world_size=32), environ, 8)


@pytest.mark.parametrize(
    ("environ", "world", "local_world"),
    [
        ({"NTASKS": 16}, 16, 8),
        ({"NTASKS": 15, "TASKS_PER_NODE": "8,7"}, 15, 7),
        ({"NTASKS": 3, "STEP_NUM_TASKS": 15, "STEP_TASKS_PER_NODE": "8,7", "TASKS_PER_NODE": "2,1"}, 15, 7),
        ({"NNODES": 5, "STEP_NUM_NODES": 2, "NTASKS": 16}, 16, 8),
        ({"NNODES": 3, "TASKS_PER_NODE": "4(x2),2"}, 10, 4),
    ],
)
def test_step_variables_and_uneven_task_counts_are_understood(
    environ: dict[str, Any], world: int, local_world: int
) -> None:
    decision = decide(options(), slurm(PROCID=9, LOCALID=2, NODEID=1, **environ), 8)
    assert (decision.world_size, decision.local_world_size) == (world, local_world)


@pytest.mark.parametrize(
    ("environ", "devices", "device"),
    [
        ({"LOCALID": 1, "GPUS_ON_NODE": 2, "CUDA": "0,1"}, 2, 1),
        ({"LOCALID": 1, "GPUS_ON_NODE": 2, "CUDA": "1"}, 1, 0),
        ({"LOCALID": 1}, 1, 0),
    ],
)
def test_a_task_uses_its_own_gpu_whether_slurm_narrows_the_visible_ones_or_not(
    environ: dict[str, Any], devices: int, device: int
) -> None:
    cuda = {"CUDA_VISIBLE_DEVICES": environ.pop("CUDA", "")}
    decision = decide(options(), slurm(PROCID=3, NODEID=1, NTASKS=4, **environ) | cuda, devices)
    assert decision.device_ids == (device,)


def test_a_heterogeneous_job_counts_ranks_across_its_components() -> None:
    environ = slurm(HET_SIZE=2, NTASKS=3, NNODES=1, TASKS_PER_NODE="2", PROCID=2, LOCALID=0, NODEID=1)
    decision = decide(options(cpu=True), environ, 0)
    assert brief(decision) == ("slurm", 3, (2,), (None,), False)
    assert decision.init_method is not None
    assert decision.init_method.startswith("tcp://n1:")


def test_cpu_ranks_of_a_slurm_step_are_divided_over_its_nodes() -> None:
    environ = slurm(NODEID=1, NTASKS=2)
    assert decide(options(cpu=True), environ, 0).ranks == (1,)
    assert decide(options(cpu=True, world_size=6), environ, 0).ranks == (3, 4, 5)
    assert decide(options(cpu=True, gpus=2), environ, 0).ranks == (2, 3)


def test_all_nodes_derive_one_port_from_job_and_step_and_other_steps_another() -> None:
    def port(job: int, step: int, node: int, **flags: Any) -> str:
        environ = slurm(NODEID=node, NTASKS=2, JOB_ID=job, STEP_ID=step)
        url = decide(options(cpu=True, **flags), environ, 0).init_method
        assert url is not None
        return url.rpartition(":")[2]

    assert port(24, 0, 0) == port(24, 0, 1)
    assert len({port(job, step, 0) for job in range(100, 120) for step in range(5)}) == 100
    assert 1024 < int(port(2**31, 7, 0)) < 32768
    assert port(24, 0, 0, port=29500) == "29500"


def test_the_first_node_of_the_step_is_the_master_address() -> None:
    environ = slurm(NODEID=0, NTASKS=2, STEP_NODELIST="gpu[03,07]", JOB_NODELIST="gpu[01-09]")
    url = decide(options(cpu=True), environ, 0).init_method
    assert url is not None
    assert url.startswith("tcp://gpu03:")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "24", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
        slurm(STEP_ID=0xFFFF_FFFB, NTASKS=2, NODEID=0),
        slurm(STEP_ID=0xFFFF_FFFA, NTASKS=2, NODEID=0),
    ],
)
def test_a_batch_script_or_interactive_shell_is_no_task(environ: dict[str, str]) -> None:
    assert decide(options(cpu=True, world_size=2), environ, 0).mode == "single_node"


def test_a_step_of_one_task_on_one_node_is_like_the_machine_alone() -> None:
    environ = slurm(NNODES=1, NTASKS=1, NODEID=0, STEP_NODELIST="n1")
    assert brief(decide(options(), environ, 2)) == ("slurm", 2, (0, 1), (0, 1), True)
    assert decide(options(), environ, 1).init_method is None
    assert decide(options(device_id=1), environ, 2).device_ids == (1,)


@pytest.mark.parametrize(
    ("flags", "environ", "devices", "fragment"),
    [
        ({}, {"NTASKS": 15}, 8, "15 tasks on 2 nodes"),
        ({}, {"NTASKS": 4, "TASKS_PER_NODE": "2(x3)"}, 8, "contradict each other"),
        ({}, {"NTASKS": 4, "TASKS_PER_NODE": "2,1"}, 8, "contradict each other"),
        ({}, {"TASKS_PER_NODE": "2(y3)"}, 8, "should look like"),
        ({}, {"NTASKS": 4, "PROCID": 7}, 8, "contradict each other"),
        ({}, {"NTASKS": 4, "PROCID": ""}, 8, "no SLURM_PROCID"),
        ({}, {"NTASKS": 2, "NODEID": 2}, 8, "SLURM_NODEID is 2"),
        ({}, {"NTASKS": 4, "GPUS_ON_NODE": 1}, 1, "Slurm started 2 tasks on this node, but it has 1 GPU"),
        ({}, {"NTASKS": 4}, 0, "add --cpu"),
        ({}, {"NTASKS": 2}, 0, "add --cpu"),
        ({"cpu": True, "world_size": 3}, {"NTASKS": 2}, 0, "cannot be divided evenly"),
        ({"gpus": 8, "world_size": 15}, {"NTASKS": 2}, 8, "2 x 8 = 16 ranks"),
        ({"gpus": 4}, {"NTASKS": 4}, 4, "--distributed-gpus is 4, but each of the 2, 2 tasks"),
        ({"gpus": 2}, {"NTASKS": 3, "TASKS_PER_NODE": "1,2"}, 2, "--distributed-gpus is 2, but each of the 1, 2 tasks"),
        ({"gpus": 8}, {"NTASKS": 2}, 4, "8 ranks were asked for on this node"),
        ({"rank": 4}, {"NTASKS": 2}, 4, "--distributed-rank is set by Slurm"),
        ({"cpu": True}, {"NTASKS": 2, "JOB_ID": ""}, 0, "no SLURM_JOB_ID: give --distributed-port"),
        ({"cpu": True}, {"NTASKS": 2, "STEP_NODELIST": ""}, 0, "no SLURM_STEP_NODELIST"),
    ],
)
def test_slurm_steps_that_cannot_be_met_are_refused(
    flags: dict[str, Any], environ: dict[str, Any], devices: int, fragment: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decide(options(**flags), slurm(**({"NODEID": 1, "PROCID": 2, "LOCALID": 0} | environ)), devices)
    assert fragment in str(caught.value)


# --- this machine alone (A18) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "devices", "expected"),
    [
        ({}, 0, ("single_process", 1, (0,), (None,), False)),
        ({}, 1, ("single_process", 1, (0,), (0,), False)),
        ({}, 3, ("single_node", 3, (0, 1, 2), (0, 1, 2), True)),
        ({"world_size": 1}, 0, ("single_process", 1, (0,), (None,), False)),
        ({"world_size": 1}, 4, ("single_process", 1, (0,), (0,), False)),
        ({"world_size": 2}, 4, ("single_node", 2, (0, 1), (0, 1), True)),
        ({"gpus": 2}, 4, ("single_node", 2, (0, 1), (0, 1), True)),
        ({"world_size": 2, "gpus": 2}, 4, ("single_node", 2, (0, 1), (0, 1), True)),
        ({"device_id": 3}, 4, ("single_process", 1, (0,), (3,), False)),
        ({"no_spawn": True}, 4, ("single_process", 1, (0,), (0,), False)),
        ({"cpu": True}, 4, ("single_process", 1, (0,), (None,), False)),
        ({"cpu": True, "world_size": 3}, 0, ("single_node", 3, (0, 1, 2), (None, None, None), True)),
        ({"cpu": True, "gpus": 2}, 0, ("single_node", 2, (0, 1), (None, None), True)),
        ({"world_size": 4, "share_devices": True}, 2, ("single_node", 4, (0, 1, 2, 3), (0, 1, 0, 1), True)),
    ],
)
def test_one_machine_trains_on_its_own_devices(flags: dict[str, Any], devices: int, expected: tuple[Any, ...]) -> None:
    assert brief(decide(options(**flags), {}, devices)) == expected


def test_several_ranks_of_one_machine_join_on_a_port_found_when_they_start() -> None:
    assert decide(options(cpu=True, world_size=2), {}, 0).init_method == "tcp://127.0.0.1:0"
    assert decide(options(cpu=True), {}, 0).init_method is None


@pytest.mark.parametrize(("devices", "init"), [(2, "tcp://127.0.0.1:29500"), (1, None)])
def test_a_port_alone_works_on_one_node(devices: int, init: str | None) -> None:
    assert decide(options(port=29500), {}, devices).init_method == init


@pytest.mark.parametrize(
    ("flags", "devices", "backend"),
    [
        ({}, 2, "nccl"),
        ({"cpu": True}, 2, "gloo"),
        ({"backend": "gloo"}, 2, "gloo"),
        ({"world_size": 4, "share_devices": True}, 2, "gloo"),
        ({}, 0, "gloo"),
    ],
)
def test_gpus_use_nccl_unless_it_cannot_work(flags: dict[str, Any], devices: int, backend: str) -> None:
    assert decide(options(**flags), {}, devices).backend == backend


@pytest.mark.parametrize(
    ("flags", "devices", "fragment"),
    [
        ({"world_size": 8}, 2, "8 ranks were asked for on this node, but it has 2 GPUs visible"),
        ({"world_size": 2}, 1, "it has 1 GPU visible"),
        ({"world_size": 2}, 0, "add --cpu"),
        ({"gpus": 1}, 0, "add --cpu"),
        ({"world_size": 8, "gpus": 4}, 4, "give --distributed-init-method, the rendezvous of all ranks"),
        ({"rank": 4, "world_size": 8}, 8, "--distributed-rank 4 needs --distributed-init-method"),
        ({"no_spawn": True, "world_size": 2}, 2, "--distributed-no-spawn starts one of 2 ranks"),
        ({"device_id": 1}, 1, "--device-id is 1, but the GPUs here are 0 to 0"),
        ({"device_id": 0}, 0, "no GPU is visible"),
        ({"device_id": 0, "world_size": 2}, 2, "--device-id is for one rank"),
        ({"backend": "nccl"}, 0, "nccl needs GPUs"),
    ],
)
def test_requests_beyond_this_machine_are_refused(flags: dict[str, Any], devices: int, fragment: str) -> None:
    with pytest.raises(RequestError) as caught:
        decide(options(**flags), {}, devices)
    assert fragment in str(caught.value)


# --- Slurm's notations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2,5],gpu[01-03]", ["n1", "n2", "n5", "gpu01", "gpu02", "gpu03"]),
        ("rack[0-1]n[9-10]-ib", ["rack0n9-ib", "rack0n10-ib", "rack1n9-ib", "rack1n10-ib"]),
        ("a,b , c", ["a", "b", "c"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_host_lists_expand_in_order(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1", "n1]", "n[a-b]", "n[2-1]", "n[1-99999999]", "n[]"])
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        expand(text)


@pytest.mark.parametrize(("text", "counts"), [("4(x2),2", [4, 4, 2]), ("1", [1]), ("3,1(x2)", [3, 1, 1])])
def test_task_counts_expand(text: str, counts: list[int]) -> None:
    assert task_counts(text) == counts
