from __future__ import annotations

import pytest

from gputrain_tui.diagnosis.cut_network import describe_cut, network_failure
from trainer.contract.outcome import LOST_PEER_KINDS
from trainer.contract.record import Failure

CHANGED = "; a firewall, a route or an MTU between them changed"


def pairs(*failed: str, hosts: str = "abc", unknown: str = "") -> dict[tuple[str, str], bool]:
    """Every pair of hosts, each a letter: ``failed`` those that do not connect, ``unknown`` a host without answer."""
    known = [host for host in hosts if host not in unknown]
    return {(one, other): one + other not in failed for one in known for other in known if one != other}


@pytest.mark.parametrize(
    ("reach", "words"),
    [
        ({}, ""),
        (pairs(), ""),
        (pairs("ab", hosts="ab"), "a cannot reach b on tcp (b can reach a)" + CHANGED),
        (pairs("ba", hosts="ab"), "b cannot reach a on tcp (a can reach b)" + CHANGED),
        (pairs("ab", "ba", hosts="ab"), "a and b cannot reach each other on tcp" + CHANGED),
        ({("a", "b"): False}, "a cannot reach b on tcp" + CHANGED),
        (pairs("bc", "cb"), "b and c cannot reach each other on tcp" + CHANGED),
        (pairs("bc", "cb", unknown="b"), ""),
        (pairs("ab", "ba", "ac", "ca"), "a and the 2 other hosts cannot reach each other on tcp" + CHANGED),
        (
            pairs("ab", "ac", hosts="abcd"),
            "a cannot reach b on tcp (b can reach a); a cannot reach c on tcp (c can reach a)" + CHANGED,
        ),
        (
            pairs("ab", "ba", "bc", "cd", "dc", hosts="abcd"),
            "a and b cannot reach each other on tcp; b cannot reach c on tcp (c can reach b); 1 more pair" + CHANGED,
        ),
    ],
)
def test_hosts_that_do_not_reach_each_other_are_named_with_the_direction(
    reach: dict[tuple[str, str], bool], words: str
) -> None:
    assert describe_cut(reach) == words


@pytest.mark.parametrize("kind", [*LOST_PEER_KINDS, "exception", "signal", "node_lost", "launch", "exit"])
def test_a_cut_network_is_the_cause_only_where_ranks_have_lost_each_other(kind: str) -> None:
    failure = Failure(time=7.0, kind=kind, message="words", rank=1, host="b", step=3)
    assert network_failure(failure, pairs()) is None
    found = network_failure(failure, pairs("ab"))
    if kind not in ("lost_peer", "silent", "stalled"):
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.rank, found.step, found.time) == ("network", None, 3, 7.0)
    assert found.message.startswith("a cannot reach b on tcp (b can reach a); ")
