"""Puts into words which hosts of a run no longer reach each other."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.record import Failure

SUSPECT_KINDS = ("lost_peer", "silent", "stalled")
"""Kinds of failures in which ranks have lost each other, and nothing else is known to have failed."""


def network_failure(failure: Failure, reach: Mapping[tuple[str, str], bool]) -> Failure | None:
    """Return the failure of the network between hosts that explains another one; None if it explains nothing."""
    cut = describe_cut(reach)
    if not cut or failure.kind not in SUSPECT_KINDS:
        return None
    return Failure(time=failure.time, kind="network", step=failure.step, in_step=failure.in_step, message=cut)


def describe_cut(reach: Mapping[tuple[str, str], bool]) -> str:
    """Return which hosts cannot reach which on TCP, and in which direction; empty if all reach each other.

    Args:
        reach: for a host and another one, whether the first can connect to the second; unknown pairs are absent.
    """
    failed = [pair for pair, connects in reach.items() if not connects]
    hosts = list(dict.fromkeys(host for pair in reach for host in pair))
    texts = []
    for host in hosts if len(hosts) > 2 else ():
        theirs = [pair for pair in failed if host in pair]
        if len(theirs) == 2 * (len(hosts) - 1):
            texts.append(f"{host} and the {len(hosts) - 1} other hosts cannot reach each other on tcp")
            failed = [pair for pair in failed if pair not in theirs]
    for begin, end in failed:
        back = reach.get((end, begin))
        if back is False and (end, begin) in failed[: failed.index((begin, end))]:
            continue
        if back is False:
            texts.append(f"{begin} and {end} cannot reach each other on tcp")
        else:
            texts.append(f"{begin} cannot reach {end} on tcp" + (f" ({end} can reach {begin})" if back else ""))
    if not texts:
        return ""
    max_pairs = 2  # pairs of hosts that are named: a firewall between many makes as many pairs
    count = len(texts) - max_pairs
    more = f"; {count} more pair{'s' * (count > 1)}" if count > 0 else ""
    return f"{'; '.join(texts[:max_pairs])}{more}; a firewall, a route or an MTU between them changed"
