"""Which processes of a script are ranks, by the groups that they have joined, and when their failures are the run's."""

from __future__ import annotations

import os
import socket
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from trainer.agent.assignment import RankAssignment
from trainer.agent.started_group import GroupMember, Place, PlannedRanks, Verdict, verdict
from trainer.agent.started_ranks import REPLACED_S, StartedRanks, socket_name
from trainer.agent.worker_process import StartedProcess, WorkerProcess
from trainer.contract.options import Distributed
from trainer.contract.outcome import RankReport
from trainer.contract.record import EventWriter

ONE = PlannedRanks(world_size=1, ranks=[0], processes=1)
TWO = PlannedRanks(world_size=2, ranks=[0, 1], processes=1)
"""``starts_ranks = true`` with ``cpu_ranks = 2``."""
LAUNCHED = PlannedRanks(world_size=2, ranks=[0, 1], processes=2)
SECOND_NODE = PlannedRanks(world_size=4, ranks=[2, 3], processes=1)


@pytest.mark.parametrize(
    ("planned", "rank", "world_size", "given", "expected"),
    [
        pytest.param(ONE, 1, 2, {}, "rank", id="one rank is planned, two are started"),
        pytest.param(ONE, 0, 1, {}, "rank", id="a group of one that trains"),
        pytest.param(TWO, 1, 2, {"living": [0], "living_world_size": 2}, "rank", id="the second one"),
        pytest.param(TWO, 3, 4, {}, "rank", id="more than planned on the only node"),
        pytest.param(ONE, 0, 2, {"living": [0, 1], "living_world_size": 2}, "helper", id="the rank is taken"),
        pytest.param(ONE, 1, 4, {"living": [0], "living_world_size": 2}, "helper", id="a group beside the ranks"),
        pytest.param(ONE, 0, 1, {"trains": True}, "helper", id="the script trains itself"),
        pytest.param(ONE, 0, 2, {"trains": True}, "helper", id="an evaluation on two processes"),
        pytest.param(TWO, 1, 2, {"own_group": (0, 2)}, "rank", id="the script is the first rank"),
        pytest.param(TWO, 1, 2, {"own_group": (0, 2), "trains": True}, "rank", id="and trains already"),
        pytest.param(TWO, 0, 2, {"own_group": (0, 2)}, "helper", id="that rank is the script itself"),
        pytest.param(ONE, 0, 2, {"own_group": (0, 1)}, "helper", id="a group of another size than the script's"),
        pytest.param(LAUNCHED, 0, 2, {"own_group": (0, 2)}, "helper", id="a launched rank's helpers"),
        pytest.param(LAUNCHED, 0, 2, {}, "rank", id="a wrapper around the training"),
        pytest.param(LAUNCHED, 1, 2, {}, "nested", id="each of two planned ranks starts two"),
        pytest.param(LAUNCHED, 0, 1, {}, "helper", id="a group of one under a planned rank"),
        pytest.param(SECOND_NODE, 3, 4, {}, "rank", id="a rank of this node"),
        pytest.param(SECOND_NODE, 1, 4, {}, "elsewhere", id="a rank of another node"),
        pytest.param(SECOND_NODE, 2, 8, {}, "elsewhere", id="more ranks than planned on several nodes"),
    ],
)
def test_members_of_groups(
    planned: PlannedRanks, rank: int, world_size: int, given: dict[str, object], expected: Verdict
) -> None:
    state = {"own_group": None, "trains": False, "living": [], "living_world_size": 0} | given
    member = GroupMember(plan_pid=1, rank=rank, world_size=world_size)
    assert verdict(planned, member, plan_rank=planned.ranks[0], **state) == expected  # type: ignore[arg-type]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _join(ranks: StartedRanks, script: WorkerProcess, rank: int) -> Connection:
    """Ask for a place as a process of the script does, from this process; return the connection."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_name(ranks.address) as name:
        peer.connect(name)
    pipe = Connection(peer.detach())
    pipe.send_bytes(msgspec.json.encode(GroupMember(plan_pid=os.getpid(), rank=rank, world_size=2)))
    ranks.accept([script])
    assert msgspec.json.decode(pipe.recv_bytes(), type=Place).is_rank
    return pipe


@pytest.mark.parametrize("replaced", [False, True])
def test_a_failed_rank_fails_the_run_after_a_minute_unless_another_process_takes_its_place(
    tmp_path: Path, replaced: bool
) -> None:
    clock, own = Clock(), Pipe()
    assignment = RankAssignment(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, host="here", device_id=None, device="cpu",
        init_method=None, backend="gloo", parent_pid=None, distributed=Distributed(), run_dir=None, run_id="",
        report=lambda _: None,
    )  # fmt: skip
    script = WorkerProcess(assignment, StartedProcess(os.getpid()), own[0], 0)
    ranks = StartedRanks(tmp_path, [assignment], processes=1, writer=EventWriter(None), pids={}, now=clock)
    pipes = [_join(ranks, script, rank) for rank in range(2)]
    failure = assignment.failure("exception", "it broke")
    ranks.fail(ranks.ranks[1], RankReport(failure=failure, time_ns=7))
    ranks.end(ranks.ranks[1])
    clock.now_s += REPLACED_S
    assert ranks.lasting_failures() == []
    assert ranks.causes() == [(7, failure)], "if the script ends now"
    if replaced:
        pipes.append(_join(ranks, script, 1))
    clock.now_s += 0.1
    assert ranks.lasting_failures() == ([] if replaced else [(7, failure)])
    ranks.close()
    for pipe in (*pipes, *own):
        pipe.close()
    os.close(script.process.sentinel)
    os.close(ranks.ranks[0].process.sentinel)
    if replaced:
        os.close(ranks.ranks[1].process.sentinel)
