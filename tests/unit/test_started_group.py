"""Which processes of a script are ranks, by the groups that they have joined."""

from __future__ import annotations

import pytest

from trainer.agent.started_group import GroupMember, PlannedRanks, Verdict, verdict

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
