"""Findings about hosts that have become silent, and that answer again."""

from __future__ import annotations

from collections.abc import Iterable

from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.plan.planner import Plan
from trainer.contract.record import Finding

SILENT_S = 5.0
"""Silence of a host, which answers once a second, from which it is reported; the run is not diagnosed meanwhile, as
the record of its ranks ends where the connection broke."""


class SilentHosts(set[int]):
    """Nodes whose hosts do not answer."""

    def update_from(self, running: Iterable[NodeProcess], plan: Plan, now: float) -> list[Finding]:
        """Return a finding for each host that has become silent or answers again since the last call."""
        findings = []
        for process in running:
            if (process.silent_s() >= SILENT_S) == (process.node in self):
                continue
            self ^= {process.node}
            findings.append(
                Finding(
                    time=now,
                    kind="host_silent",
                    state="raised" if process.node in self else "cleared",
                    rank=plan.nodes[process.node].first_rank,
                    host=process.host,
                    message=f"no contact with {process.host}: its ranks may still be running; "
                    "their record follows when it answers again",
                    advice=f"check that `ssh {process.host} true` works",
                )
            )
        return findings
