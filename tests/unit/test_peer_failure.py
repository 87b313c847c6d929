from __future__ import annotations

import pytest

from trainer.distributed.peer_failure import attribute_failure
from trainer.distributed.rendezvous import RankMachine

MACHINES = [
    RankMachine(host="h1", ranks=[0, 1]),
    RankMachine(host="h2", ranks=[2]),
    RankMachine(host="h3", ranks=[3, 4, 5]),
]


@pytest.mark.parametrize(
    ("reports", "rank", "store_answered", "interface_down", "expected"),
    [
        ([0, 1, 2], 2, True, "", "no report from ranks 3 to 5 on h3"),
        ([0, 1, 2, 3, 5], 0, True, "", "no report from rank 4 on h3"),
        ([0, 1], 1, True, "", "no report from rank 2 on h2, ranks 3 to 5 on h3"),
        ([0, 1, 2, 3, 4, 5], 1, True, "", ""),
        ([], 4, False, "", "h1 (ranks 0, 1) is down, or cannot be reached from h3"),
        ([], 4, False, "eth0", "h3 has lost the other machines: its interface eth0 is down"),
        ([0], 0, True, "eth0", "h1 has lost the other machines: its interface eth0 is down"),
    ],
)
def test_a_silent_machine_is_lost_unless_this_one_is_cut_off(
    reports: list[int], rank: int, store_answered: bool, interface_down: str, expected: str
) -> None:
    failures = dict.fromkeys(reports, "")
    assert (
        attribute_failure(MACHINES, failures, rank=rank, store_answered=store_answered, interface_down=interface_down)
        == expected
    )


def test_the_reported_failure_of_a_rank_comes_before_a_lost_machine() -> None:
    reports = {0: "", 3: "ValueError: no"}
    assert (
        attribute_failure(MACHINES, reports, rank=0, store_answered=True, interface_down="")
        == "rank 3 on h3 failed: ValueError: no"
    )
