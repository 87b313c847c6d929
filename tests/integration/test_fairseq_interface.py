"""fairseq's ``distributed_utils`` as its programs call it: ``args`` passed to every function, groups, sizes.

The order of the calls is that of fairseq's ``train.py`` and ``trainer.py``: the parent infers the init method, every
process it starts sets its device and its rank and joins, and the trainer exchanges statistics and checkpoints.
"""

from __future__ import annotations

import copy
import warnings
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_group import Processes

from trainer import distributed as distributed_utils
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed

LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "24",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


def parsed(**values: Any) -> Namespace:
    """Return what fairseq's parser of 2019 (0.9) gives, on CPUs."""
    return Namespace(
        **{
            "distributed_world_size": 2,
            "distributed_rank": 0,
            "distributed_backend": "gloo",
            "distributed_init_method": None,
            "distributed_port": -1,
            "device_id": 0,
            "distributed_no_spawn": False,
            "ddp_backend": "c10d",
            "cpu": True,
            **values,
        }
    )


def configured(**values: Any) -> SimpleNamespace:
    """Return the configuration of later versions of fairseq."""
    training = parsed(distributed_num_procs=1, tpu=False, pipeline_model_parallel=False, **values)
    del training.cpu
    return SimpleNamespace(distributed_training=training, common=SimpleNamespace(cpu=True, tpu=False, seed=1))


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, *SLURM, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # an inferred world is that of the GPUs, of which two are asked for


# ----------------------------------------------------------------------------------------- in the started processes


def distributed_main(i: int, args: Any, start_rank: int) -> dict[str, Any]:
    """Join as fairseq's process of this name does, and go on as its ``main``."""
    settings = getattr(args, "distributed_training", args)
    settings.device_id = i
    if settings.distributed_rank is None:
        settings.distributed_rank = start_rank + i
    settings.distributed_rank = distributed_utils.distributed_init(args)
    try:
        return exchanges(settings)
    finally:
        distributed_utils.shutdown()


def exchanges(args: Any) -> dict[str, Any]:
    """Make the exchanges of fairseq's trainer, each by the arguments that it gives."""
    group, device = distributed_utils.get_default_group(), torch.device("cpu")
    rank = args.distributed_rank
    counts = {"nsentences": rank + 1, "loss": 0.25}
    norm = torch.tensor([rank + 1.0])
    distributed_utils.all_reduce(norm, group=group)
    state = {"model": torch.full((3,), 7.0), "step": 9} if distributed_utils.is_master(args) else None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again = distributed_utils.distributed_init(args)
    return {
        "rank": (rank, distributed_utils.get_rank(), distributed_utils.get_rank(group), again),
        "world": (distributed_utils.get_world_size(), distributed_utils.get_world_size(group)),
        "master": distributed_utils.is_master(args),
        "lists": distributed_utils.all_gather_list([{"loss": 0.5 * rank}, "x" * 70_000], max_size=16384),
        "stats": distributed_utils.all_gather_list(rank, group=group, max_size=16384),
        "sum": norm.item(),
        "max": distributed_utils.all_reduce(torch.tensor([rank]), group, op="max").item(),
        "dict": dict(distributed_utils.all_reduce_dict(counts, device=device, group=group)),
        "state": distributed_utils.broadcast_object(state, src_rank=0, group=group, dist_device=device),
        "warned": len(warned),
    }


def gather_in_groups(rank: int, args: Any) -> list[Any]:
    """Gather more often in a group of some ranks than among all, and then among all."""
    args.distributed_rank = rank
    distributed_utils.distributed_init(args)
    try:
        some = dist.new_group([0, 2])
        found: list[Any] = []
        if rank in (0, 2):
            found += [distributed_utils.all_gather_list((turn, rank), group=some) for turn in range(3)]
            found.append(distributed_utils.all_reduce_dict({"n": rank}, group=some))
            found.append(distributed_utils.broadcast_object("of 2" if rank == 2 else None, 2, group=some))
            found.append((distributed_utils.get_world_size(some), distributed_utils.get_rank(some)))
            distributed_utils.barrier(group=some)
        return [*found, distributed_utils.all_gather_list(rank)]
    finally:
        distributed_utils.shutdown()


# ------------------------------------------------------------------------------------------------------- the tests


def started_as_by_call_main(processes: Processes, args: Any) -> list[dict[str, Any]]:
    """Infer, and start the processes, with ranks that they assign themselves."""
    settings = getattr(args, "distributed_training", args)
    distributed_utils.infer_init_method(settings)
    assert settings.distributed_init_method is not None
    assert not settings.distributed_no_spawn
    start_rank, settings.distributed_rank = settings.distributed_rank, None
    requests = [{"i": i, "args": copy.deepcopy(args), "start_rank": start_rank} for i in range(2)]
    return processes.results(distributed_main, requests)


@pytest.mark.parametrize("made", [parsed, configured])
def test_what_is_inferred_on_one_node_is_joined_and_serves_fairseqs_exchanges(processes: Processes, made: Any) -> None:
    for rank, found in enumerate(started_as_by_call_main(processes, made())):
        assert found["rank"] == (rank,) * 4
        assert found["world"] == (2, 2)
        assert found["master"] == (rank == 0)
        assert [each["loss"] for each, _ in found["lists"]] == [0.0, 0.5]
        assert [len(text) for _, text in found["lists"]] == [70_000] * 2, "max_size is no cap"
        assert found["stats"] == [0, 1]
        assert (found["sum"], found["max"]) == (3.0, 1)
        assert found["dict"] == {"nsentences": 3.0, "loss": 0.5}
        assert found["state"]["step"] == 9
        assert found["state"]["model"].tolist() == [7.0] * 3
        assert found["warned"] == 1, "the second distributed_init only warns"


def test_own_options_are_inferred_and_joined_too(processes: Processes) -> None:
    options = Distributed(cpu=True, distributed_world_size=2)
    url = distributed_utils.infer_init_method(options)
    assert url == options.distributed_init_method
    assert (options.distributed_rank, options.distributed_gpus) == (0, 2)
    requests = [{"i": i, "args": copy.copy(options), "start_rank": 0} for i in range(2)]
    for rank, request in enumerate(requests):
        request["args"].distributed_rank = rank  # type: ignore[attr-defined]
    assert [found["stats"] for found in processes.results(distributed_main, requests)] == [[0, 1]] * 2


def test_groups_of_some_ranks_count_their_own_exchanges(processes: Processes) -> None:
    args = parsed(distributed_world_size=3)
    distributed_utils.infer_init_method(args)
    found = processes.results(gather_in_groups, [{"rank": rank, "args": copy.copy(args)} for rank in range(3)])
    in_group = [[(turn, 0), (turn, 2)] for turn in range(3)]
    assert found[0] == [*in_group, {"n": 2.0}, "of 2", (2, 0), [0, 1, 2]]
    assert found[1] == [[0, 1, 2]]
    assert found[2] == [*in_group, {"n": 2.0}, "of 2", (2, 1), [0, 1, 2]]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (LAUNCHER, {"distributed_init_method": "env://", "distributed_world_size": 4, "distributed_rank": 3}),
        (SLURM, {"distributed_init_method": "tcp://n1:", "distributed_world_size": 4, "distributed_rank": 3}),
    ],
    ids=["launcher", "slurm"],
)
def test_a_launchers_ranks_are_set_over_the_parsers_defaults(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: dict[str, Any]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    args = parsed(distributed_world_size=1, distributed_num_procs=1)
    distributed_utils.infer_init_method(args)
    assert args.distributed_init_method.startswith(expected.pop("distributed_init_method"))
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.distributed_no_spawn, args.distributed_num_procs) == (True, 1)


def test_an_init_method_that_is_given_is_kept_and_one_process_needs_none() -> None:
    args = parsed(distributed_init_method="tcp://10.0.0.1:29500", distributed_rank=4)
    before = copy.copy(args)
    distributed_utils.infer_init_method(args)
    assert args == before
    alone = parsed(distributed_world_size=1)
    assert distributed_utils.infer_init_method(alone, force_distributed=False) is None
    assert alone == parsed(distributed_world_size=1)
    assert distributed_utils.distributed_init(alone) == 0
    assert distributed_utils.is_master(alone)
    assert not distributed_utils.is_master(parsed(distributed_rank=3))


def test_a_port_that_is_asked_for_is_the_one_inferred() -> None:
    args = parsed(distributed_port=29_555)
    distributed_utils.infer_init_method(args)
    assert args.distributed_init_method == "tcp://127.0.0.1:29555"


def test_ranks_that_were_not_assigned_are_refused_in_one_line() -> None:
    args = parsed(distributed_rank=None, distributed_init_method="tcp://127.0.0.1:29500")
    with pytest.raises(RequestError, match=r"^args\.distributed_rank is None: a started process sets it to the first"):
        distributed_utils.distributed_init(args)
