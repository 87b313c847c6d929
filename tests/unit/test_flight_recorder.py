"""What torch records of the collectives, and the heartbeat of machines; neither needs a GPU to be shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.contract.backends import is_nccl
from trainer.distributed import flight_recorder
from trainer.distributed.heartbeat import LOST_S, Heartbeat
from trainer.distributed.network_probe import interface_setting
from trainer.distributed.peer_failure import report_failure
from trainer.distributed.rendezvous import RankMachine
from trainer.distributed.store import RendezvousStore

MACHINES = [RankMachine(host="one", ranks=[0, 1]), RankMachine(host="two", ranks=[2, 3])]


def test_nccl_dumps_collectives_into_the_run_directory_unless_the_user_sets_another(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}
    flight_recorder.prepare(tmp_path / "collectives_12", 12, environ)
    assert environ.pop("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/collectives_") == f"{tmp_path}/collectives_"
    assert environ == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "50",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/collectives_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ({"entries": []}, ""),
        (
            {
                "entries": [
                    {
                        "record_id": number,
                        "collective_seq_id": number + 1,
                        "profiling_name": "nccl:all_reduce" if number < 4 else "nccl:barrier",
                        "input_sizes": [[4, 1000]] if number < 4 else [],
                        "pg_id": 0,
                    }
                    for number in (3, 4, 1, 2)
                ],
                "pg_status": {"0": {"last_enqueued_collective": "5", "last_completed_collective": "3"}},
            },
            "its last collectives are all_reduce 3 of [4, 1000], all_reduce 4 of [4, 1000], barrier 5; 3 of 5 are "
            "complete",
        ),
    ],
)
def test_the_last_collectives_are_put_into_words(recorded: dict[str, object], words: str) -> None:
    assert flight_recorder.describe_collectives(recorded) == words


def entry(number: int, name: str, **fields: object) -> dict[str, object]:
    """An entry as torch 2.13 dumps it, without the fields that are not read."""
    return {
        "record_id": number,
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[3, 5]],
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "state": "scheduled",
        **fields,
    }


@pytest.mark.parametrize(
    ("entries", "completed", "found"),
    [
        (  # as dumped by gloo, whose entries stay scheduled
            [entry(0, "gloo:all_reduce"), entry(1, "gloo:all_reduce"), entry(2, "gloo:barrier", input_sizes=[])],
            "2",
            [("all_reduce", 1, "complete"), ("all_reduce", 2, "complete"), ("barrier", 3, "scheduled")],
        ),
        (  # by the fields of NCCL's entries: states, and messages between two ranks with numbers of their own
            [
                entry(7, "nccl:all_reduce", state="completed"),
                entry(9, "nccl:all_gather", state="started"),
                entry(8, "nccl:send 0->1", is_p2p=True, p2p_seq_id=4, state="started"),
                entry(1, "nccl:barrier", state="completed"),
            ],
            8,
            [("all_reduce", 8, "complete"), ("send 0->1", 4, "started"), ("all_gather", 10, "started")],
        ),
        (  # by torch's hook for a backend that records nothing: complete would only mean issued
            [entry(0, "c10d:allreduce"), entry(1, "c10d:allgather")],
            "2",
            [("all_reduce", 1, "scheduled"), ("all_gather", 2, "scheduled")],
        ),
        ([], "-1", []),
    ],
)
def test_the_last_collectives_have_their_state(
    entries: list[dict[str, object]], completed: object, found: list[tuple[str, int, str]]
) -> None:
    recorded = {"entries": entries, "pg_status": {"0": {"last_completed_collective": completed}}}
    last = flight_recorder.collectives_of(recorded)
    assert [(each.name, each.number, each.state) for each in last] == found
    assert all(each.group == "default_pg" for each in last)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", True), ("nccl2", True), ("nccl-lazy", True), ("nccl-legacy", True), ("gloo", False), ("ucc", False)],
)
def test_every_backend_over_nccl_is_nccl(backend: str, expected: bool) -> None:
    assert is_nccl(backend) == expected


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"), reason="this torch has no hook that records"
)
@pytest.mark.parametrize(("backend", "records"), [("own", False), ("gloo", True)])
def test_a_group_whose_backend_records_nothing_gets_torchs_recorder(backend: str, records: bool) -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    if not hasattr(dist.Backend, "OWN"):
        dist.Backend.register_backend("own", fake._create_fake_pg, extended_api=True, devices=["cpu"])
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch_attaches = hasattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks")
    try:
        before = len(flight_recorder.last_collectives())  # of earlier groups of this process
        assert flight_recorder.attach(dist.group.WORLD) == (not records and not torch_attaches)
        flight_recorder.attach_all()  # once is enough
        dist.all_reduce(torch.ones(3, 5))
        last = flight_recorder.last_collectives()
    finally:
        dist.destroy_process_group()
    assert [(each.name, each.sizes) for each in last[before:]] == [("all_reduce", [[3, 5]])]


@pytest.mark.parametrize(
    ("gloo", "setting"), [(True, ("GLOO_SOCKET_IFNAME", "eth1")), (False, ("NCCL_SOCKET_IFNAME", "=eth1"))]
)
def test_each_backend_is_bound_to_the_interface_by_its_own_variable(gloo: bool, setting: tuple[str, str]) -> None:
    assert interface_setting("eth1", gloo=gloo) == setting


class HeartbeatClock:
    now_s = 0.0
    step = 0


def hearts(store: dist.Store) -> tuple[Heartbeat, Heartbeat]:
    first, second = (
        Heartbeat(store, MACHINES, here, step=lambda: HeartbeatClock.step, now=lambda: HeartbeatClock.now_s)
        for here in range(2)
    )
    return first, second


def test_a_machine_without_heartbeats_is_lost_and_one_that_left_is_not() -> None:
    HeartbeatClock.now_s = 0.0
    first, second = hearts(dist.HashStore())
    for HeartbeatClock.now_s in (0.0, LOST_S, 2 * LOST_S):
        assert (second.exchange(), first.exchange()) == ("", "")
    assert first.unheard() == []
    HeartbeatClock.now_s += LOST_S
    HeartbeatClock.step += 1
    assert (first.exchange(), first.unheard()) == ("", [2, 3]), "a rank that makes steps has lost no machine"
    HeartbeatClock.now_s += LOST_S
    assert first.exchange() == f"no heartbeat from two (ranks 2, 3) for {LOST_S:g} s"
    second.leave()
    HeartbeatClock.now_s += LOST_S
    assert (first.exchange(), first.exchange()) == ("", "")
    assert first.unheard() == []


def test_a_reported_failure_reaches_the_others_with_the_next_heartbeat() -> None:
    HeartbeatClock.now_s = 0.0
    store = dist.HashStore()
    first, second = hearts(store)
    assert (second.exchange(), first.exchange()) == ("", "")
    report_failure(RendezvousStore(store, "tcp://one:29600"), 3, "CUDA error: device-side assert")
    assert first.exchange() == "rank 3 on two failed: CUDA error: device-side assert"


def test_a_store_that_does_not_answer_is_the_first_machines_loss() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    HeartbeatClock.now_s = 0.0
    _, second = hearts(store)
    assert second.exchange() == ""
    del server
    HeartbeatClock.now_s = LOST_S
    assert second.exchange() == "one (ranks 0, 1) is down, or cannot be reached from two"
